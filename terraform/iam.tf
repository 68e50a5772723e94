# to be filled
data "aws_iam_policy_document" "assume" {
  for_each = { ec2 = "ec2.amazonaws.com", batch = "ecs-tasks.amazonaws.com" }

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = [each.value]
    }
  }
}

resource "aws_iam_role" "worker" {
  name               = "${local.prefix}-worker"
  description        = "EC2 workers of ${var.name}"
  assume_role_policy = data.aws_iam_policy_document.assume["ec2"].json
}

resource "aws_iam_instance_profile" "worker" {
  name = "${local.prefix}-worker"
  role = aws_iam_role.worker.name
}

resource "aws_iam_role" "batch_host" {
  count              = local.batch ? 1 : 0
  name               = "${local.prefix}-batch-host"
  description        = "Batch hosts of ${var.name}: the ECS agent's own calls"
  assume_role_policy = data.aws_iam_policy_document.assume["ec2"].json
}

resource "aws_iam_role_policy_attachment" "batch_host" {
  count      = local.batch ? 1 : 0
  role       = aws_iam_role.batch_host[0].name
  policy_arn = "${local.arn}:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_instance_profile" "batch_host" {
  count = local.batch ? 1 : 0
  name  = "${local.prefix}-batch-host"
  role  = aws_iam_role.batch_host[0].name
}

resource "aws_iam_role" "batch_job" {
  count              = local.batch ? 1 : 0
  name               = "${local.prefix}-batch-job"
  description        = "Batch jobs of ${var.name}"
  assume_role_policy = data.aws_iam_policy_document.assume["batch"].json
}
