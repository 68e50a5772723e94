# One lane: jobs to workers, events back, and dead letters, with an alarm on the two that need a person.

terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}

locals {
  # Fourteen days: the longest that SQS keeps a message, so that a fleet may wait over a weekend.
  retention_seconds = 1209600
  max_receives      = 20
}

data "aws_iam_policy_document" "queue" {
  for_each = toset(["jobs", "events", "dead"])

  statement {
    sid       = "DenyPlainHttp"
    effect    = "Deny"
    actions   = ["sqs:*"]
    resources = ["${var.arn}-${each.value}"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }

  statement {
    sid       = "DenyOtherAccounts"
    effect    = "Deny"
    actions   = ["sqs:*"]
    resources = ["${var.arn}-${each.value}"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "StringNotEquals"
      variable = "aws:PrincipalAccount"
      values   = [var.account]
    }
  }
}

resource "aws_sqs_queue" "jobs" {
  name                       = "${var.name}-jobs"
  message_retention_seconds  = local.retention_seconds
  visibility_timeout_seconds = 60
  receive_wait_time_seconds  = 20
  sqs_managed_sse_enabled    = true
  policy                     = data.aws_iam_policy_document.queue["jobs"].json

  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead.arn
    maxReceiveCount     = local.max_receives
  })
}

resource "aws_sqs_queue" "events" {
  name                       = "${var.name}-events"
  message_retention_seconds  = local.retention_seconds
  visibility_timeout_seconds = 60
  receive_wait_time_seconds  = 20
  sqs_managed_sse_enabled    = true
  policy                     = data.aws_iam_policy_document.queue["events"].json
}

resource "aws_sqs_queue" "dead" {
  name                      = "${var.name}-dead"
  message_retention_seconds = local.retention_seconds
  sqs_managed_sse_enabled   = true
  policy                    = data.aws_iam_policy_document.queue["dead"].json
}

resource "aws_cloudwatch_metric_alarm" "dead" {
  alarm_name          = "${var.name}-dead-letters"
  alarm_description   = "A job was received 20 times and never finished. `ct fleet status` names it."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = aws_sqs_queue.dead.name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 1
  threshold           = 0
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = [var.topic_arn]
}

resource "aws_cloudwatch_metric_alarm" "oldest" {
  alarm_name          = "${var.name}-oldest-job"
  alarm_description   = "A job has waited six hours and no worker took it."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateAgeOfOldestMessage"
  dimensions          = { QueueName = aws_sqs_queue.jobs.name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 1
  threshold           = 21600
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = [var.topic_arn]
}
