# What a worker is made of. Fleets themselves are launched by the controller with CreateFleet; Terraform owns the template.

data "aws_ec2_instance_types" "worker" {
  for_each = toset(["x86_64", "arm64"])

  filter {
    name   = "instance-type"
    values = var.instance_types
  }

  filter {
    name   = "processor-info.supported-architecture"
    values = [each.value]
  }
}

locals {
  # Architecture → its instance types in the order of preference; only architectures that are used.
  types_by_architecture = {
    for architecture, found in data.aws_ec2_instance_types.worker :
    architecture => [for type in var.instance_types : type if contains(found.instance_types, type)]
    if length(setintersection(found.instance_types, var.instance_types)) > 0
  }
  unknown_types = setsubtract(var.instance_types, flatten(values(local.types_by_architecture)))
  debian        = { x86_64 = "amd64", arm64 = "arm64" }
}

data "aws_ami" "debian" {
  for_each    = local.types_by_architecture
  most_recent = true
  owners      = ["136693071363"] # Debian's own account

  filter {
    name   = "name"
    values = ["debian-13-${local.debian[each.key]}-*"]
  }
}

# `ct cloud build-ami` writes the newest image here; the launch template asks at each launch, so nothing is applied again.
resource "aws_ssm_parameter" "image" {
  #checkov:skip=CKV2_AWS_34:EC2 cannot resolve an image from an encrypted parameter, and an image's id is no secret.
  for_each       = local.types_by_architecture
  name           = "${local.path}/image/${each.key}"
  description    = "Image of ${each.key} workers; at first the stock Debian 13"
  type           = "String"
  data_type      = "aws:ec2:image"
  insecure_value = data.aws_ami.debian[each.key].id

  lifecycle {
    ignore_changes = [insecure_value]
  }
}

resource "aws_launch_template" "worker" {
  for_each                             = local.types_by_architecture
  name                                 = "${local.prefix}-worker-${replace(each.key, "_", "-")}"
  description                          = "Workers of ${var.name}, ${each.key}"
  update_default_version               = true
  image_id                             = "resolve:ssm:${aws_ssm_parameter.image[each.key].name}"
  instance_type                        = each.value[0]
  instance_initiated_shutdown_behavior = "terminate"
  vpc_security_group_ids               = [aws_security_group.worker.id]

  user_data = base64encode(templatefile("${path.module}/templates/user-data.sh.tftpl", {
    max_lifetime_minutes = var.max_lifetime_minutes
    name                 = var.name
    bucket               = local.bucket
    region               = local.region
    parameter            = local.config_parameter
  }))

  iam_instance_profile {
    arn = aws_iam_instance_profile.worker.arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type                = "gp3"
      volume_size                = var.root_volume.gb
      volume_initialization_rate = var.root_volume.initialization_rate_mib_ps
      encrypted                  = true
      kms_key_id                 = var.kms_key_arn
      delete_on_termination      = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { "Name" = "${local.prefix}-worker", "inspect-fleet-bucket" = local.bucket })
    }
  }

  lifecycle {
    precondition {
      condition     = length(local.unknown_types) == 0
      error_message = "instance_types: ${join(", ", local.unknown_types)} not offered in ${local.region}; `aws ec2 describe-instance-type-offerings` lists what is."
    }
  }
}
