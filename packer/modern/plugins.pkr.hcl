# For Packer 1.7 and later, which fetches its builders as plugins; the bound is filled in from versions.env.
packer {
  required_version = ">= 1.9.0"

  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "@PACKER_AMAZON_PLUGIN@"
    }
  }
}
