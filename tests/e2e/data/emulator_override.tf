# What the emulator needs beside the configuration as it is.

provider "aws" {
  max_retries       = 2    # an operation that it lacks must not be tried for minutes
  s3_use_path_style = true # it has no host names per bucket
}

# AWS makes its own service-linked role for Batch; the emulator wants one to be named.
resource "aws_batch_compute_environment" "this" {
  service_role = aws_iam_role.worker.arn

  # It gives the template's tags back in another form, so that each plan makes a version of it; with a role of one's own
  # the provider would then replace the environment.
  lifecycle {
    ignore_changes = [compute_resources[0].launch_template[0].version]
  }
}

# It is spoken to over plain HTTP, which the bucket's own policy refuses.
data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "OwnAccount"
    actions   = ["s3:*"]
    resources = [local.bucket_arn, "${local.bucket_arn}/*"]

    principals {
      type        = "AWS"
      identifiers = [local.account]
    }
  }
}

# The worker image of this checkout, on this machine.
locals {
  batch_pushed = true
  batch_image  = "inspect-fleet-worker:test"
}
