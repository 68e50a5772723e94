# Lanes are made in advance: a fleet owns one while it runs, so fleets never read each other's messages.

locals {
  lanes = { for number in range(1, var.lanes + 1) : format("lane-%02d", number) => number }

  # Written out, so that a queue's own policy and the roles' policies can name queues before they exist.
  queue_arn = "${local.arn}:sqs:${local.region}:${local.account}:${local.prefix}"
}

module "lane" {
  source   = "./modules/lane"
  for_each = local.lanes

  name      = "${local.prefix}-${each.key}"
  arn       = "${local.queue_arn}-${each.key}"
  account   = local.account
  topic_arn = aws_sns_topic.this.arn
}
