# What the scripts read: one SSM parameter with every name, and outputs with the same content. Scripts never build names.

locals {
  config_parameter = "${local.path}/config"
  metrics          = "InspectFleet"

  config = {
    schema     = 1
    name       = var.name
    account    = local.account
    region     = local.region
    bucket     = local.bucket
    lanes      = { for name, lane in module.lane : name => lane.urls }
    secrets    = { for name, parameter in aws_ssm_parameter.secret : name => parameter.name }
    topic      = aws_sns_topic.this.arn
    metrics    = local.metrics
    repository = aws_ecr_repository.worker.repository_url

    workers = {
      launch_templates     = { for architecture, template in aws_launch_template.worker : architecture => template.id }
      images               = { for architecture, parameter in aws_ssm_parameter.image : architecture => parameter.name }
      instance_types       = local.types_by_architecture
      subnets              = local.subnet_ids
      role                 = aws_iam_role.worker.arn
      max_lifetime_minutes = var.max_lifetime_minutes
    }

    batch = !local.batch ? null : {
      queues         = { for kind, queue in aws_batch_job_queue.this : kind => queue.name }
      job_definition = aws_batch_job_definition.worker[0].name
      log_group      = aws_cloudwatch_log_group.batch[0].name
      image          = local.batch_pushed ? local.batch_image : null
    }
  }
}

# The parameter's length as a plan can tell it, before queues have URLs: what grows with variables, and 1,600 for the rest.
locals {
  config_estimate = 1600 + length(jsonencode([
    { for lane in keys(local.lanes) : lane => { for queue in ["jobs", "events", "dead"] :
    queue => "https://sqs.${local.region}.amazonaws.com/${local.account}/${local.prefix}-${lane}-${queue}" } },
    { for name in var.secret_names : name => "${local.secret_path}/${name}" },
    local.types_by_architecture,
    var.subnet_ids,
  ]))
}

# Intelligent tiering: free up to 4 kB, as with the default four lanes; beyond about eight lanes 0.05 USD a month.
resource "aws_ssm_parameter" "config" {
  #checkov:skip=CKV2_AWS_34:Names only, no secret; an encrypted value could not be read in a plan.
  name           = local.config_parameter
  description    = "All names of this estate, for the scripts"
  type           = "String"
  tier           = "Intelligent-Tiering"
  insecure_value = jsonencode(local.config)

  lifecycle {
    precondition {
      condition     = local.config_estimate <= 8192
      error_message = "the names of ${var.lanes} lanes and ${length(var.secret_names)} secret_names do not fit into one SSM parameter (about ${local.config_estimate} of 8192 characters): fewer of either, or a shorter name."
    }
  }
}

output "schema" {
  description = "Version of this content."
  value       = local.config.schema
}

output "name" {
  description = "The estate's name."
  value       = local.config.name
}

output "account" {
  description = "The AWS account."
  value       = local.config.account
}

output "region" {
  description = "The region."
  value       = local.config.region
}

output "bucket" {
  description = "The bucket of logs, runs, code and lanes."
  value       = local.config.bucket
}

output "lanes" {
  description = "Each lane's three queue URLs."
  value       = local.config.lanes
}

output "secrets" {
  description = "Each provider key's SSM parameter; names only."
  value       = local.config.secrets
}

output "topic" {
  description = "The SNS topic of alarms and of ended fleets."
  value       = local.config.topic
}

output "metrics" {
  description = "The CloudWatch namespace of our own metrics."
  value       = local.config.metrics
}

output "repository" {
  description = "The registry of the worker image."
  value       = local.config.repository
}

output "workers" {
  description = "Launch templates, image parameters and instance types by architecture; subnets; the workers' role and longest lifetime."
  value       = local.config.workers
}

output "batch" {
  description = "Queues by kind, job definition, log group and image; null without Batch."
  value       = local.config.batch
}
