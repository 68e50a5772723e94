  # Options of the source that Packer 1.6.6 does not know.
  imds_support = "v2.0"
  deprecate_at = timeadd(timestamp(), "8760h")

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }
