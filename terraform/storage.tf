# One bucket for logs, runs, code, lanes. Destroy never empties it unless asked.

locals {
  make_bucket = !var.use_existing_bucket
  bucket      = local.make_bucket ? aws_s3_bucket.this[0].id : data.aws_s3_bucket.existing[0].id
  bucket_arn  = "${local.arn}:s3:::${coalesce(var.bucket_name, "${local.prefix}-${local.account}-${local.region}")}"
}

data "aws_s3_bucket" "existing" {
  count  = local.make_bucket ? 0 : 1
  bucket = var.bucket_name
}

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_18:Access logs need a second bucket that grows by itself; CloudTrail data events can be switched on where they are wanted.
  #checkov:skip=CKV_AWS_144:Evaluation logs can be made again; a copy in a second region doubles the cost of storage.
  #checkov:skip=CKV_AWS_145:SSE-S3 encrypts at no cost; a KMS key is used when kms_key_arn names one.
  #checkov:skip=CKV2_AWS_62:Nothing listens to object events: workers report over SQS.
  count         = local.make_bucket ? 1 : 0
  bucket        = coalesce(var.bucket_name, "${local.prefix}-${local.account}-${local.region}")
  force_destroy = var.empty_bucket_on_destroy
}

resource "aws_s3_bucket_versioning" "this" {
  count  = local.make_bucket ? 1 : 0
  bucket = aws_s3_bucket.this[0].id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  count  = local.make_bucket ? 1 : 0
  bucket = aws_s3_bucket.this[0].id

  rule {
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  count                   = local.make_bucket ? 1 : 0
  bucket                  = aws_s3_bucket.this[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  count  = local.make_bucket ? 1 : 0
  bucket = aws_s3_bucket.this[0].id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "DenyPlainHttp"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [local.bucket_arn, "${local.bucket_arn}/*"]

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
}

resource "aws_s3_bucket_policy" "this" {
  count  = local.make_bucket ? 1 : 0
  bucket = aws_s3_bucket.this[0].id
  policy = data.aws_iam_policy_document.bucket.json

  # S3 refuses two changes of a bucket's access at once.
  depends_on = [aws_s3_bucket_public_access_block.this, aws_s3_bucket_ownership_controls.this]
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  count  = local.make_bucket ? 1 : 0
  bucket = aws_s3_bucket.this[0].id

  rule {
    id     = "interrupted-uploads"
    status = "Enabled"
    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }

  rule {
    id     = "noncurrent-versions"
    status = "Enabled"
    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.retention_days.noncurrent
    }

    expiration {
      expired_object_delete_marker = true
    }
  }

  # Every run's own prefix begins with its year, hence "20". Promoted logs, code and worker packages stay.
  dynamic "rule" {
    for_each = {
      partial = { prefix = "partial/", days = var.retention_days.partial }
      working = { prefix = "logs/working/", days = var.retention_days.working }
      runs    = { prefix = "20", days = var.retention_days.working }
    }

    content {
      id     = rule.key
      status = "Enabled"

      filter {
        prefix = rule.value.prefix
      }

      expiration {
        days = rule.value.days
      }
    }
  }

  depends_on = [aws_s3_bucket_versioning.this]
}
