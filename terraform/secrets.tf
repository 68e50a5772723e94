# Terraform owns the names; `ies secrets push` the values. The write-only first value keeps the real ones out of the state
# for good: the provider never reads a parameter's value whose value is write-only.

locals {
  secret_path = "${local.path}/secrets"
  unset       = "unset"
}

resource "aws_ssm_parameter" "secret" {
  #checkov:skip=CKV_AWS_337:The AWS managed key encrypts at no cost; a key of one's own is 1 USD a month.
  for_each         = var.secret_names
  name             = "${local.secret_path}/${each.value}"
  description      = "Provider key ${each.value}; the value comes from `ies secrets push`"
  type             = "SecureString"
  value_wo         = local.unset
  value_wo_version = 1
}
