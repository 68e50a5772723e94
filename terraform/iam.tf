# Who may do what. Machines: worker, Batch host, Batch job. People and CI: researcher, operator, ci, as policies to attach.
# iam-calls.json says for every call who makes it and which actions it needs; a test compares it with these documents.

locals {
  roles_arn = "${local.arn}:iam::${local.account}:role/${local.prefix}"
  ec2_arn   = "${local.arn}:ec2:${local.region}:${local.account}"
  ssm_arn   = "${local.arn}:ssm:${local.region}:${local.account}:parameter${local.path}"

  # Here and written out where that can be, so that a plan knows the policies, and their length, before anything is made.
  topic_arn      = "${local.arn}:sns:${local.region}:${local.account}:${local.prefix}"
  group_arn      = "${local.ec2_arn}:security-group/${aws_security_group.worker.id}"
  repository_arn = "${local.arn}:ecr:${local.region}:${local.account}:repository/${local.prefix}-worker"

  # Of all lanes at once: a policy that named each would be too long for sixteen. Two digits, as lanes have, are no other estate's.
  lane_arns = { for queue in ["jobs", "events", "dead"] : queue => "${local.queue_arn}-lane-??-${queue}" }

  # Below the root (design of the key layout: evalworker/contract/layout.py). Run ids begin with the year.
  run_prefixes    = ["20*", "partial/*", "logs/working/*", "probe-*"]
  shipped_code    = ["code/*", "worker/*"]
  not_for_workers = ["lanes/*", "20*/manifest.json", "20*/control.json", "20*/standing.json", "20*/machines.json", "20*/batch.json", "20*/events/*"]
}

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

# What workers and Batch jobs share: the bucket without what is not theirs, and the provider keys.
data "aws_iam_policy_document" "runner" {
  statement {
    sid       = "Runs"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = [for prefix in local.run_prefixes : "${local.bucket_arn}/${prefix}"]
  }

  statement {
    sid       = "ShippedCode"
    actions   = ["s3:GetObject"]
    resources = [for prefix in concat(local.shipped_code, ["lanes/*"]) : "${local.bucket_arn}/${prefix}"]
  }

  # Without it a missing key is a 403 instead of a 404.
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [local.bucket_arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = concat(local.run_prefixes, local.shipped_code, ["lanes/*"])
    }
  }

  statement {
    sid       = "NotTheirs"
    effect    = "Deny"
    actions   = ["s3:PutObject", "s3:DeleteObject"]
    resources = [for prefix in concat(local.not_for_workers, local.shipped_code) : "${local.bucket_arn}/${prefix}"]
  }

  statement {
    sid       = "NotPromoted"
    effect    = "Deny"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
    resources = ["${local.bucket_arn}/logs/stage/*", "${local.bucket_arn}/logs/prod/*"]
  }

  statement {
    sid       = "Names"
    actions   = ["ssm:GetParameter"]
    resources = ["${local.ssm_arn}/config"]
  }

  # Nothing else is below secrets/, and there may be no key at all.
  statement {
    sid       = "ProviderKeys"
    actions   = ["ssm:GetParameters"]
    resources = ["${local.ssm_arn}/secrets/*"]
  }

  dynamic "statement" {
    for_each = var.kms_key_arn == null ? [] : [var.kms_key_arn]

    content {
      sid       = "BucketKey"
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

# Workers

resource "aws_iam_role" "worker" {
  name               = "${local.prefix}-worker"
  description        = "EC2 workers of ${var.name}"
  assume_role_policy = data.aws_iam_policy_document.assume["ec2"].json
}

resource "aws_iam_instance_profile" "worker" {
  name = "${local.prefix}-worker"
  role = aws_iam_role.worker.name
}

data "aws_iam_policy_document" "worker" {
  source_policy_documents = [data.aws_iam_policy_document.runner.json]

  statement {
    sid       = "TakeJobs"
    actions   = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:ChangeMessageVisibility"]
    resources = [local.lane_arns.jobs]
  }

  statement {
    sid       = "Report"
    actions   = ["sqs:SendMessage"]
    resources = [local.lane_arns.events]
  }

  dynamic "statement" {
    for_each = var.ssm_access ? ["*"] : []

    # The agent's channels: these actions take no ARN. The AWS managed policy would also give every parameter's value.
    content {
      sid       = "Sessions"
      resources = [statement.value]
      actions = [
        "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
      ]
    }
  }

  dynamic "statement" {
    for_each = var.ssm_access ? [1] : []

    content {
      sid       = "SessionsRegister"
      actions   = ["ssm:UpdateInstanceInformation"]
      resources = ["${local.ec2_arn}:instance/*"]
    }
  }
}

resource "aws_iam_role_policy" "worker" {
  name   = "worker"
  role   = aws_iam_role.worker.id
  policy = data.aws_iam_policy_document.worker.json
}

# Batch

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

resource "aws_iam_role_policy" "batch_job" {
  count  = local.batch ? 1 : 0
  name   = "batch-job"
  role   = aws_iam_role.batch_job[0].id
  policy = data.aws_iam_policy_document.batch_job.json
}

# Inspect writes a Batch job's logs to S3 itself. Its first step asks whether the bucket is there: by HeadBucket, which carries no
# prefix and so never meets the condition of List, then by GetBucketLocation.
data "aws_iam_policy_document" "batch_job" {
  source_policy_documents = [data.aws_iam_policy_document.runner.json]

  statement {
    sid       = "BucketIsThere"
    actions   = ["s3:GetBucketLocation"]
    resources = [local.bucket_arn]
  }
}

# Researchers: submit, follow, stop and read runs, on EC2 and on Batch.

data "aws_iam_policy_document" "researcher" {
  statement {
    sid       = "Runs"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = [for prefix in concat(local.run_prefixes, local.shipped_code, ["logs/*", "lanes/*", "timings/*", "locks/*"]) : "${local.bucket_arn}/${prefix}" if prefix != "logs/working/*"]
  }

  statement {
    sid       = "List"
    actions   = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
    resources = [local.bucket_arn]
  }

  statement {
    sid       = "Lanes"
    actions   = ["sqs:SendMessage", "sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:ChangeMessageVisibility", "sqs:GetQueueAttributes"]
    resources = values(local.lane_arns)
  }

  statement {
    sid       = "Names"
    actions   = ["ssm:GetParameter", "ssm:GetParameters"]
    resources = ["${local.ssm_arn}/config", "${local.ssm_arn}/image/*"]
  }

  # CreateFleet also asks for RunInstances, CreateTags, PassRole and the image parameter (ssm:GetParameters above).
  statement {
    sid     = "Launch"
    actions = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = concat(
      [for kind in ["fleet", "instance", "volume", "network-interface", "spot-instances-request"] : "${local.ec2_arn}:${kind}/*"],
      [for id in local.subnet_ids : "${local.ec2_arn}:subnet/${id}"],
      [local.group_arn, "${local.arn}:ec2:${local.region}::image/*"],
    )
  }

  statement {
    sid       = "LaunchTemplates"
    actions   = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = ["${local.ec2_arn}:launch-template/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/inspect-fleet"
      values   = [var.name]
    }
  }

  statement {
    sid       = "TagAtLaunch"
    actions   = ["ec2:CreateTags"]
    resources = ["${local.ec2_arn}:*/*"]

    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["CreateFleet", "RunInstances"]
    }
  }

  statement {
    sid       = "PassWorkerRole"
    actions   = ["iam:PassRole"]
    resources = ["${local.roles_arn}-worker"]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ec2.amazonaws.com"]
    }
  }

  # The reaper marks an instance on one pass and ends it on the next.
  statement {
    sid       = "OwnInstances"
    actions   = ["ec2:TerminateInstances", "ec2:CreateTags", "ec2:DeleteVolume"]
    resources = ["${local.ec2_arn}:instance/*", "${local.ec2_arn}:volume/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/inspect-fleet"
      values   = [var.name]
    }
  }

  dynamic "statement" {
    for_each = local.batch ? [1] : []

    content {
      sid       = "Batch"
      actions   = ["batch:SubmitJob", "batch:TerminateJob"]
      resources = concat(local.batch_arns, ["${local.batch_arn}:job/*"])
    }
  }

  dynamic "statement" {
    for_each = local.batch ? [1] : []

    content {
      sid       = "BatchLogs"
      actions   = ["logs:GetLogEvents"]
      resources = ["${local.logs_arn}:${local.path}/batch:*"]
    }
  }

  statement {
    sid       = "Tell"
    actions   = ["sns:Publish"]
    resources = [local.topic_arn]
  }

  statement {
    sid       = "Measure"
    actions   = ["cloudwatch:PutMetricData"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "cloudwatch:namespace"
      values   = [local.metrics]
    }
  }

  statement {
    sid       = "DoctorAsksForItself"
    actions   = ["iam:SimulatePrincipalPolicy"]
    resources = ["${local.arn}:iam::${local.account}:user/*", "${local.arn}:iam::${local.account}:role/*"]
  }

  # None of these takes an ARN.
  statement {
    sid       = "Look"
    resources = ["*"]
    actions = concat(
      ["ec2:DescribeImages", "ec2:DescribeInstances", "ec2:DescribeInstanceTypes", "ec2:DescribeSpotPriceHistory", "ec2:DescribeVolumes"],
      ["pricing:GetProducts", "servicequotas:GetServiceQuota", "ssm:DescribeParameters", "sts:DecodeAuthorizationMessage"],
      local.batch ? ["batch:DescribeJobs", "batch:ListJobs"] : [],
    )
  }

  dynamic "statement" {
    for_each = var.ssm_access ? [1] : []

    content {
      sid       = "Sessions"
      actions   = ["ssm:StartSession"]
      resources = ["${local.ec2_arn}:instance/*"]

      condition {
        test     = "StringEquals"
        variable = "ssm:resourceTag/inspect-fleet"
        values   = [var.name]
      }
    }
  }

  # The bucket's, and the disks' of the machines that are launched: EC2 asks for their key in the name of who launches.
  dynamic "statement" {
    for_each = var.kms_key_arn == null ? [] : [var.kms_key_arn]

    content {
      sid       = "Key"
      actions   = ["kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptFrom", "kms:ReEncryptTo"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn == null ? [] : [var.kms_key_arn]

    content {
      sid       = "DiskKey"
      actions   = ["kms:CreateGrant"]
      resources = [statement.value]

      condition {
        test     = "Bool"
        variable = "kms:GrantIsForAWSResource"
        values   = ["true"]
      }
    }
  }
}

resource "aws_iam_policy" "people" {
  for_each = {
    researcher         = data.aws_iam_policy_document.researcher.json
    operator-machines  = data.aws_iam_policy_document.operator["machines"].json
    operator-images    = data.aws_iam_policy_document.operator["images"].json
    operator-resources = data.aws_iam_policy_document.operator["resources"].json
    ci                 = data.aws_iam_policy_document.ci.json
  }

  name        = "${local.prefix}-${each.key}"
  description = "Inspect Fleet ${var.name}: ${each.key}"
  policy      = each.value

  lifecycle {
    precondition {
      condition     = length(replace(each.value, "/\\s/", "")) <= 6144
      error_message = "the policy ${each.key} would have ${length(replace(each.value, "/\\s/", ""))} characters and IAM takes 6144: use a shorter name, a shorter bucket_name, or fewer subnet_ids."
    }
  }
}
