# Write-only arguments (1.11) keep provider keys out of the state; the S3 backend's own lock file needs 1.10.
terraform {
  required_version = ">= 1.11"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7"
    }
  }
}
