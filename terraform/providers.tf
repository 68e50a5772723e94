provider "aws" {
  region = var.region

  default_tags {
    tags = local.tags
  }
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.id
  arn       = "arn:${local.partition}"

  # All names start so, and all ARNs in policies are limited by it.
  prefix = "inspect-fleet-${var.name}"
  path   = "/inspect-fleet/${var.name}"

  # `inspect-fleet` is the cost-allocation tag and what policies and the reaper compare.
  tags = merge(var.tags, { "inspect-fleet" = var.name, "managed-by" = "terraform" })
}
