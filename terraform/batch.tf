# AWS Batch: spot and on-demand hosts that exist only while jobs run, a queue for each, one job definition.

locals {
  batch = var.batch.enabled

  # One job definition has one image, hence one architecture: that of the preferred instance type.
  batch_architecture = one([for architecture, types in local.types_by_architecture : architecture if contains(types, var.instance_types[0])])
  batch_types        = local.batch_architecture == null ? [] : local.types_by_architecture[local.batch_architecture]
  batch_kinds        = local.batch ? { spot = "SPOT", on-demand = "EC2" } : {}
  batch_pushed       = var.batch.image_digest != null || var.batch.image_elsewhere != null
  batch_image = coalesce(
    var.batch.image_elsewhere,
    "${aws_ecr_repository.worker.repository_url}${var.batch.image_digest == null ? ":not-pushed-yet" : "@${var.batch.image_digest}"}",
  )
}

resource "aws_cloudwatch_log_group" "batch" {
  #checkov:skip=CKV_AWS_158:CloudWatch encrypts by itself at no cost; no key or prompt is logged by the worker.
  count             = local.batch ? 1 : 0
  name              = "${local.path}/batch"
  retention_in_days = var.retention_days.logs
}

# Hosts of Batch jobs: the same promises as workers, on the image that Batch chooses.
resource "aws_launch_template" "batch" {
  count                  = local.batch ? 1 : 0
  name                   = "${local.prefix}-batch"
  description            = "Batch hosts of ${var.name}"
  update_default_version = true

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.batch.root_volume_gb
      encrypted             = true
      kms_key_id            = var.kms_key_arn
      delete_on_termination = true
    }
  }

  # Batch tags the instances itself (from compute_resources) and refuses a template that does.
  tag_specifications {
    resource_type = "volume"
    tags          = merge(local.tags, { "Name" = "${local.prefix}-batch" })
  }
}

# Without a name of its own a changed environment is made before the old one goes: a name could not be taken twice.
resource "aws_batch_compute_environment" "this" {
  for_each = local.batch_kinds
  type     = "MANAGED"
  state    = "ENABLED"
  tags     = { "Name" = "${local.prefix}-${each.key}" }

  compute_resources {
    type                = each.value
    allocation_strategy = each.value == "SPOT" ? "SPOT_PRICE_CAPACITY_OPTIMIZED" : "BEST_FIT_PROGRESSIVE"
    bid_percentage      = each.value == "SPOT" ? var.batch.spot_bid_percents : null
    min_vcpus           = 0
    max_vcpus           = var.batch.max_vcpus
    instance_type       = local.batch_types
    instance_role       = aws_iam_instance_profile.batch_host[0].arn
    subnets             = local.subnet_ids
    security_group_ids  = [aws_security_group.worker.id]
    tags                = merge(local.tags, { "Name" = "${local.prefix}-batch-${each.key}" })

    launch_template {
      launch_template_id = aws_launch_template.batch[0].id
      version            = aws_launch_template.batch[0].latest_version # Batch would look up "$Latest" once and keep what it found
    }
  }

  lifecycle {
    create_before_destroy = true
  }

  depends_on = [aws_iam_role_policy_attachment.batch_host]
}

resource "aws_batch_job_queue" "this" {
  for_each = local.batch_kinds
  name     = "${local.prefix}-${each.key}"
  state    = "ENABLED"
  priority = each.key == "spot" ? 1 : 2

  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.this[each.key].arn
  }

  # A job that cannot start is cancelled with the reason instead of waiting for ever.
  dynamic "job_state_time_limit_action" {
    for_each = toset([
      "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
      "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
      "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
    ])

    content {
      action           = "CANCEL"
      state            = "RUNNABLE"
      reason           = job_state_time_limit_action.value
      max_time_seconds = var.batch.runnable_minutes * 60
    }
  }
}

resource "aws_batch_job_definition" "worker" {
  #checkov:skip=CKV_AWS_210:Sandboxes are containers inside the job's own Docker engine, which needs a privileged container.
  count                 = local.batch ? 1 : 0
  name                  = "${local.prefix}-worker"
  type                  = "container"
  platform_capabilities = ["EC2"]
  propagate_tags        = true

  # No volume is mounted: Docker's data is on the anonymous volume that the image declares, and goes with the container.
  container_properties = jsonencode({
    image      = local.batch_image
    privileged = true
    jobRoleArn = aws_iam_role.batch_job[0].arn
    resourceRequirements = [
      { type = "VCPU", value = tostring(var.batch.vcpus) },
      { type = "MEMORY", value = tostring(var.batch.memory_mib) },
    ]
    environment = [
      { name = "AWS_DEFAULT_REGION", value = local.region },
      { name = "INSPECT_FLEET_NAME", value = var.name },
      { name = "S3_BUCKET_NAME", value = local.bucket },
    ]
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        "awslogs-group"         = aws_cloudwatch_log_group.batch[0].name
        "awslogs-region"        = local.region
        "awslogs-stream-prefix" = "job"
      }
    }
  })

  timeout {
    attempt_duration_seconds = var.batch.timeout_minutes * 60
  }

  # A lost host is not the job's fault; anything else would only spend the money again.
  retry_strategy {
    attempts = var.batch.host_retries

    evaluate_on_exit {
      on_status_reason = "Host EC2*"
      action           = "RETRY"
    }

    evaluate_on_exit {
      on_reason = "*"
      action    = "EXIT"
    }
  }
}
