# The worker AMI. Everything here is known to Packer 1.6.6 and later; what only newer ones know is below modern/, and
# `ct cloud build-ami` puts it in when the installed Packer is one (evalops/cloud/packer.py). Values come from there as well:
# `packer validate packer` checks the template with the defaults.

variable "estate" {
  type        = string
  description = "The estate whose workers boot this image."
  default     = "default"
}

variable "region" {
  type        = string
  description = "Where it is built and used."
  default     = "us-east-1"
}

variable "architecture" {
  type        = string
  description = "Of the image: x86_64 or arm64, as EC2 says it."
  default     = "x86_64"
}

variable "debian_architecture" {
  type        = string
  description = "The same as Debian says it: amd64 or arm64."
  default     = "amd64"
}

variable "debian_release" {
  type        = string
  description = "Of the source image."
  default     = "13"
}

variable "debian_owner" {
  type        = string
  description = "Account that publishes Debian's images."
  default     = "136693071363"
}

variable "instance_type" {
  type        = string
  description = "Of the machine that is built on: cores shorten the build."
  default     = "m7i.large"
}

variable "volume_gb" {
  type        = number
  description = "Root volume. Workers may have a larger one, never a smaller one."
  default     = 20
}

variable "kms_key_id" {
  type        = string
  description = "Key of the image's encryption; empty: the account's default EBS key."
  default     = ""
}

variable "subnet_id" {
  type        = string
  description = "Where it is built; empty: the default VPC."
  default     = ""
}

variable "ssh_interface" {
  type        = string
  description = "How Packer reaches the machine: public_ip, private_ip or session_manager."
  default     = "public_ip"
}

variable "ssh_from" {
  type        = list(string)
  description = "Networks that may connect by SSH during the build; by default none but a loopback address."
  default     = ["127.0.0.1/32"]
}

variable "instance_profile" {
  type        = string
  description = "Profile of the machine that is built on; needed by session_manager alone."
  default     = ""
}

variable "user_data" {
  type        = string
  description = "First commands of the machine that is built on: it ends by itself if nobody ends it."
  default     = "#!/bin/sh\nshutdown -P +180\n"
}

variable "build_id" {
  type        = string
  description = "Marks everything temporary, so that what an interrupted build left can be found."
  default     = "by-hand"
}

variable "ami_name" {
  type        = string
  description = "Name of the image."
  default     = "inspect-fleet-worker"
}

variable "image_tags" {
  type        = map(string)
  description = "What the image is made of: version, hashes, sandbox images."
  default     = {}
}

variable "payload" {
  type        = string
  description = "Archive of the files that the image is made from."
  default     = "/dev/null"
}

variable "scripts" {
  type        = string
  description = "Folder of the provisioning scripts."
  default     = "packer/provision"
}

variable "manifest" {
  type        = string
  description = "Where the result is written."
  default     = "manifest.json"
}

variable "registry_auth" {
  type        = string
  description = "File with the Docker config.json for private registries; empty when none is needed. A file, because values are seen in process lists."
  default     = "/dev/null"
}

variable "poll_seconds" {
  type        = number
  description = "Between two looks at the image's state."
  default     = 15
}

variable "endpoint" {
  type        = string
  description = "Where EC2 is reached, as the AWS tools are told; empty: the region's own address."
  default     = env("AWS_ENDPOINT_URL_EC2")
}

locals {
  run_tags = {
    "Name"                = "inspect-fleet-build-${var.build_id}"
    "inspect-fleet-build" = var.build_id
    "inspect-fleet-image" = var.estate
    "managed-by"          = "inspect-fleet"
  }
}

source "amazon-ebs" "worker" {
  region              = var.region
  custom_endpoint_ec2 = var.endpoint
  instance_type       = var.instance_type
  subnet_id           = var.subnet_id

  source_ami_filter {
    owners      = [var.debian_owner]
    most_recent = true

    filters = {
      name                = "debian-${var.debian_release}-${var.debian_architecture}-*"
      architecture        = var.architecture
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
  }

  ssh_username                          = "admin"
  temporary_key_pair_name               = "packer_inspect-fleet-${var.build_id}"
  ssh_interface                         = var.ssh_interface
  ssh_timeout                           = "10m"
  temporary_security_group_source_cidrs = var.ssh_from
  iam_instance_profile                  = var.instance_profile
  user_data                             = var.user_data
  shutdown_behavior                     = "terminate"

  ami_name        = var.ami_name
  ami_description = "Inspect Fleet worker"
  ena_support     = true

  launch_block_device_mappings {
    device_name           = "/dev/xvda"
    volume_type           = "gp3"
    volume_size           = var.volume_gb
    iops                  = 3000
    throughput            = 250
    encrypted             = true # so are the snapshot and the image, without another copy of it
    kms_key_id            = var.kms_key_id
    delete_on_termination = true
  }

  tags            = merge(local.run_tags, var.image_tags, { "Name" = var.ami_name })
  snapshot_tags   = merge(local.run_tags, { "Name" = var.ami_name })
  run_tags        = local.run_tags
  run_volume_tags = local.run_tags

  aws_polling {
    delay_seconds = var.poll_seconds
    max_attempts  = 240
  }

  # modern/options.hcl goes here
}

build {
  sources = ["source.amazon-ebs.worker"]

  provisioner "file" {
    source      = var.payload
    destination = "/tmp/inspect-fleet.tar.gz"
  }

  provisioner "file" {
    source      = var.registry_auth
    destination = "/dev/shm/inspect-fleet-registry.json"
  }

  provisioner "shell" {
    inline = [
      "! command -v cloud-init >/dev/null || timeout 300 cloud-init status --wait >/dev/null || true",
      "mkdir -p /tmp/inspect-fleet",
      "tar -xzf /tmp/inspect-fleet.tar.gz -C /tmp/inspect-fleet",
    ]
  }

  provisioner "shell" {
    execute_command = "sudo -n env {{ .Vars }} bash {{ .Path }}"

    # The emulator of the embedded default serves the operator's machine.
    environment_vars = ["FLEET_WITHOUT=ministack"]

    scripts = [
      "${var.scripts}/10-packages.sh",
      "${var.scripts}/20-system.sh",
      "${var.scripts}/30-environment.sh",
      "${var.scripts}/40-worker.sh",
      "${var.scripts}/50-images.sh",
      "${var.scripts}/90-clean.sh",
    ]
  }

  post-processor "manifest" {
    output     = var.manifest
    strip_path = true
  }
}
