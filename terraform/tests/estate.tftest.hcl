# Every promise of the configuration, for five shapes of it. Plans only: nothing is called, nothing is made. The provider is
# the real one, so that the IAM documents and the resources' own checks are real; what would ask AWS is overridden.

provider "aws" {
  region                      = "eu-west-2"
  access_key                  = "offline"
  secret_key                  = "offline"
  skip_credentials_validation = true
  skip_requesting_account_id  = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "123456789012" }
}

override_data {
  target = data.aws_availability_zones.available
  values = { names = ["eu-west-2a", "eu-west-2b", "eu-west-2c", "eu-west-2d"] }
}

override_data {
  target = data.aws_ec2_instance_types.worker["x86_64"]
  values = { instance_types = ["m7i.large", "m7a.large", "m6i.large", "m6a.large", "m5.large", "r6i.large"] }
}

override_data {
  target = data.aws_ec2_instance_types.worker["arm64"]
  values = { instance_types = [] }
}

override_data {
  target = data.aws_ami.debian
  values = { id = "ami-0123456789abcdef0" }
}

# Values that AWS would choose, so that what is built from them can be looked at in a plan.

override_resource {
  target          = module.lane.aws_sqs_queue.dead
  override_during = plan
  values          = { arn = "arn:aws:sqs:eu-west-2:123456789012:dead", url = "https://sqs/dead" }
}

override_resource {
  target          = aws_sns_topic.this
  override_during = plan
  values          = { arn = "arn:aws:sns:eu-west-2:123456789012:inspect-fleet-default" }
}

override_resource {
  target          = aws_vpc.this
  override_during = plan
  values          = { id = "vpc-0aaa" }
}

override_resource {
  target          = aws_subnet.worker
  override_during = plan
  values          = { id = "subnet-0aaa" }
}

override_resource {
  target          = aws_security_group.worker
  override_during = plan
  values          = { id = "sg-0aaa" }
}

override_resource {
  target          = aws_iam_role.worker
  override_during = plan
  values          = { arn = "arn:aws:iam::123456789012:role/inspect-fleet-default-worker", id = "inspect-fleet-default-worker" }
}

override_resource {
  target          = aws_iam_role.batch_job
  override_during = plan
  values          = { arn = "arn:aws:iam::123456789012:role/inspect-fleet-default-batch-job", id = "inspect-fleet-default-batch-job" }
}

override_resource {
  target          = aws_ecr_repository.worker
  override_during = plan
  values          = { arn = "arn:aws:ecr:eu-west-2:123456789012:repository/inspect-fleet-default-worker", repository_url = "123456789012.dkr.ecr.eu-west-2.amazonaws.com/inspect-fleet-default-worker" }
}

override_resource {
  target          = aws_s3_bucket.this
  override_during = plan
  values          = { id = "inspect-fleet-default-123456789012-eu-west-2" }
}

override_resource {
  target          = aws_batch_job_queue.this
  override_during = plan
  values          = { arn = "arn:aws:batch:eu-west-2:123456789012:job-queue/inspect-fleet-default-spot" }
}

override_resource {
  target          = aws_launch_template.batch
  override_during = plan
  values          = { id = "lt-0aaa", latest_version = 7 }
}

run "default" {
  command = plan

  # Network

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.endpoints) == 0 && length(aws_security_group.endpoints) == 0
    error_message = "Nothing accepts a connection."
  }

  assert {
    condition     = length(aws_default_security_group.closed) == 1
    error_message = "The VPC's default group is taken over, without rules."
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_egress_rule.worker : rule.from_port] == [443, 80]
    error_message = "Workers connect to the given ports only."
  }

  assert {
    condition     = length(aws_subnet.worker) == 3 && alltrue([for subnet in aws_subnet.worker : subnet.map_public_ip_on_launch])
    error_message = "Three public subnets are the cheap default."
  }

  assert {
    condition     = length(aws_vpc_endpoint.s3) == 1 && length(aws_vpc_endpoint.interface) == 0
    error_message = "The free gateway endpoint and no paid one."
  }

  # Workers

  assert {
    condition     = keys(aws_launch_template.worker) == ["x86_64"]
    error_message = "One launch template per architecture that is used."
  }

  assert {
    condition     = aws_launch_template.worker["x86_64"].metadata_options[0].http_tokens == "required" && aws_launch_template.worker["x86_64"].metadata_options[0].http_put_response_hop_limit == 1 && aws_launch_template.worker["x86_64"].metadata_options[0].instance_metadata_tags == "enabled"
    error_message = "IMDSv2 is required, one hop, with the instance's tags."
  }

  assert {
    condition     = aws_launch_template.batch[0].metadata_options[0].http_tokens == "required" && aws_launch_template.batch[0].metadata_options[0].http_put_response_hop_limit == 1
    error_message = "Batch hosts as well."
  }

  assert {
    condition     = aws_launch_template.worker["x86_64"].instance_initiated_shutdown_behavior == "terminate" && aws_launch_template.worker["x86_64"].key_name == null
    error_message = "Shutting down terminates; there is no key pair."
  }

  assert {
    condition     = aws_launch_template.worker["x86_64"].block_device_mappings[0].ebs[0].encrypted == "true" && aws_launch_template.worker["x86_64"].block_device_mappings[0].ebs[0].volume_type == "gp3" && aws_launch_template.worker["x86_64"].block_device_mappings[0].ebs[0].delete_on_termination == "true"
    error_message = "The disk is encrypted gp3 and goes with the instance."
  }

  assert {
    condition     = aws_launch_template.worker["x86_64"].image_id == "resolve:ssm:/inspect-fleet/default/image/x86_64" && aws_ssm_parameter.image["x86_64"].data_type == "aws:ec2:image"
    error_message = "The image is resolved from its parameter at launch."
  }

  assert {
    condition     = startswith(base64decode(aws_launch_template.worker["x86_64"].user_data), "#!/bin/sh\nshutdown -P +1440 ")
    error_message = "The dead-man switch is the first command of user data."
  }

  assert {
    condition     = strcontains(base64decode(aws_launch_template.worker["x86_64"].user_data), "ip daddr 169.254.169.254 meta skuid != \"inspect-fleet\"") && length(aws_launch_template.worker["x86_64"].user_data) < 8192
    error_message = "The metadata service is closed to other users; user data stays small."
  }

  assert {
    condition     = toset([for spec in aws_launch_template.worker["x86_64"].tag_specifications : spec.resource_type]) == toset(["instance", "volume", "network-interface"]) && alltrue([for spec in aws_launch_template.worker["x86_64"].tag_specifications : spec.tags["inspect-fleet"] == "default"])
    error_message = "What an instance brings along carries the cost-allocation tag."
  }

  # Queues

  assert {
    condition     = keys(module.lane) == ["lane-01", "lane-02", "lane-03", "lane-04"]
    error_message = "Four lanes."
  }

  # Storage

  assert {
    condition     = aws_s3_bucket_versioning.this[0].versioning_configuration[0].status == "Enabled" && aws_s3_bucket.this[0].force_destroy == false
    error_message = "Versions are kept and destroy does not empty the bucket."
  }

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this[0].rule).apply_server_side_encryption_by_default[0].sse_algorithm == "AES256"
    error_message = "SSE-S3 by default."
  }

  assert {
    condition     = alltrue([aws_s3_bucket_public_access_block.this[0].block_public_acls, aws_s3_bucket_public_access_block.this[0].block_public_policy, aws_s3_bucket_public_access_block.this[0].ignore_public_acls, aws_s3_bucket_public_access_block.this[0].restrict_public_buckets])
    error_message = "Public access is blocked in all four ways."
  }

  assert {
    condition     = aws_s3_bucket_ownership_controls.this[0].rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "The bucket's owner owns every object."
  }

  assert {
    condition = jsondecode(aws_s3_bucket_policy.this[0].policy).Statement == [{
      Sid       = "DenyPlainHttp"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = ["arn:aws:s3:::inspect-fleet-default-123456789012-eu-west-2/*", "arn:aws:s3:::inspect-fleet-default-123456789012-eu-west-2"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
    error_message = "Plain HTTP is refused."
  }

  assert {
    condition = { for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : rule.id => [for item in rule.expiration : item.days if item.days != null] if length(rule.expiration) > 0 && rule.id != "noncurrent-versions" } == {
      partial = [14], working = [365], runs = [365]
    }
    error_message = "Unfinished logs go after 14 days, working logs and runs after 365."
  }

  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : rule.abort_incomplete_multipart_upload[0].days_after_initiation if rule.id == "interrupted-uploads"] == [1] && [for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : rule.noncurrent_version_expiration[0].noncurrent_days if rule.id == "noncurrent-versions"] == [30]
    error_message = "Interrupted uploads go after a day, noncurrent versions after 30."
  }

  assert {
    condition     = alltrue([for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : !anytrue([for filter in rule.filter : try(startswith("logs/prod/", filter.prefix), false) && filter.prefix != ""])])
    error_message = "No rule touches promoted logs."
  }

  # IAM

  assert {
    condition = toset(flatten([for statement in jsondecode(data.aws_iam_policy_document.worker.json).Statement : statement.Resource if statement.Effect == "Deny" && contains(flatten([statement.Action]), "s3:PutObject")])) == toset([for prefix in [
      "lanes/*", "20*/manifest.json", "20*/control.json", "20*/standing.json", "20*/machines.json", "20*/batch.json", "20*/events/*", "code/*", "worker/*", "logs/stage/*", "logs/prod/*",
    ] : "arn:aws:s3:::inspect-fleet-default-123456789012-eu-west-2/${prefix}"])
    error_message = "Workers are denied lanes, what the controller writes, shipped code, stage and prod."
  }

  assert {
    condition     = !strcontains(data.aws_iam_policy_document.worker.json, "ec2:")
    error_message = "A worker ends itself by powering off; it may ask nothing of EC2."
  }

  assert {
    condition = alltrue([for statement in jsondecode(data.aws_iam_policy_document.operator["images"].json).Statement :
      try(values(statement.Condition.StringLike), []) == [var.name] || statement.Sid == "LookAtBuild"
    if anytrue([for arn in flatten([statement.Resource]) : endswith(arn, ":instance/*") || endswith(arn, ":volume/*")])])
    error_message = "Of machines and volumes Packer may launch, change and end those alone that carry the tag of this estate's builds."
  }

  assert {
    condition     = length(jsondecode(data.aws_iam_policy_document.operator["images"].json).Statement) == 9
    error_message = "All statements that a build needs are there."
  }

  assert {
    condition = { for statement in flatten([for part in data.aws_iam_policy_document.operator : jsondecode(part.json).Statement]) :
      statement.Sid => join(" ", [for key, value in try(statement.Condition.StringLike, {}) : "${key}=${value}"])
      if anytrue([for action in flatten([statement.Action]) : contains(["ec2:CreateTags", "ec2:DeleteTags"], action)]) } == {
      TagNew          = "ec2:CreateAction=*"
      TagOwn          = "aws:ResourceTag/inspect-fleet=default"
      TagDefaultGroup = "aws:RequestTag/inspect-fleet=default"
      TagBuilt        = "aws:RequestTag/inspect-fleet-image=default"
    }
    error_message = "Tags open doors: they are given to what is being made or has them already,"
  }

  assert {
    condition = alltrue([for statement in flatten([for part in data.aws_iam_policy_document.operator : jsondecode(part.json).Statement]) :
      length(setsubtract([for arn in flatten([statement.Resource]) : reverse(split(":", arn))[0]], ["security-group/*", "image/*", "snapshot/*"])) == 0
    if contains(["TagDefaultGroup", "TagBuilt"], statement.Sid)])
    error_message = "and otherwise to nothing but security groups, images and snapshots."
  }

  assert {
    condition = toset([for pair in flatten([for statement in flatten([for part in data.aws_iam_policy_document.operator : jsondecode(part.json).Statement]) :
      [for action in flatten([statement.Action]) : { sid = statement.Sid, action = action }]
      if length([for key in keys(try(statement.Condition.StringLike, {})) : key if startswith(key, "aws:ResourceTag/")]) == 0]) :
      "${pair.sid} ${pair.action}" if can(regex("^ec2:(Associate|Attach|Authorize|CreateRoute$|CreateLaunchTemplateVersion|Delete|Deregister|Detach|Disassociate|Modify|Revoke|Stop|Terminate)", pair.action))
      ]) == toset([
      "NewRules ec2:AuthorizeSecurityGroupEgress", "NewRules ec2:AuthorizeSecurityGroupIngress",
      "OldImages ec2:DeleteSnapshot", "OldImages ec2:DeregisterImage", "NewImage ec2:ModifyImageAttribute",
      "BuildKey ec2:DeleteKeyPair", "OpenGroup ec2:AuthorizeSecurityGroupIngress",
    ])
    error_message = "What changes or ends something of EC2 asks for the estate's tag, but for what docs/aws.md names."
  }

  assert {
    condition = alltrue([for document in concat([data.aws_iam_policy_document.researcher.json, data.aws_iam_policy_document.worker.json], [for part in data.aws_iam_policy_document.operator : part.json]) :
    !can(regex("inspect-fleet-default-[a-z?-]*\\*", document))])
    error_message = "No name ends openly: an estate called default-2 has other ones."
  }

  assert {
    condition     = length([for statement in jsondecode(data.aws_iam_policy_document.worker.json).Statement : 1 if contains(flatten([statement.Resource]), "*")]) == 0
    error_message = "Every permission of a worker names its ARN."
  }

  assert {
    condition     = alltrue([for statement in jsondecode(data.aws_iam_policy_document.worker.json).Statement : alltrue([for action in flatten([statement.Action]) : !strcontains(action, "*")])])
    error_message = "No action is a wildcard."
  }

  assert {
    condition     = jsonencode([for statement in jsondecode(aws_iam_role_policy.batch_job[0].policy).Statement : statement if statement.Sid != "BucketIsThere"]) == jsonencode(jsondecode(data.aws_iam_policy_document.runner.json).Statement) && !strcontains(data.aws_iam_policy_document.runner.json, "sqs:") && !strcontains(data.aws_iam_policy_document.runner.json, "ec2:")
    error_message = "A Batch job may use the bucket and the keys, neither queues nor EC2."
  }

  assert {
    condition     = [for statement in jsondecode(aws_iam_role_policy.batch_job[0].policy).Statement : "${join(" ", keys(statement))} ${statement.Action} ${statement.Resource}" if statement.Sid == "BucketIsThere"] == ["Action Effect Resource Sid s3:GetBucketLocation ${local.bucket_arn}"]
    error_message = "A Batch job may ask where its bucket is, without a condition: Inspect's first step on S3 asks that."
  }

  # Batch

  assert {
    condition     = { for kind, environment in aws_batch_compute_environment.this : kind => environment.compute_resources[0].type } == { spot = "SPOT", on-demand = "EC2" } && alltrue([for environment in aws_batch_compute_environment.this : environment.compute_resources[0].min_vcpus == 0])
    error_message = "Spot and on-demand hosts, none while idle."
  }

  assert {
    condition     = [for environment in aws_batch_compute_environment.this : environment.compute_resources[0].launch_template[0].version] == ["7", "7"]
    error_message = "A changed template changes the environments: what \"$Latest\" means is looked up when they are made, and never again."
  }

  assert {
    condition     = alltrue([for queue in aws_batch_job_queue.this : length(queue.job_state_time_limit_action) == 3 && alltrue([for limit in queue.job_state_time_limit_action : limit.max_time_seconds == 3600 && limit.state == "RUNNABLE"])])
    error_message = "A job that cannot start is cancelled after an hour."
  }

  assert {
    condition     = [for rule in aws_batch_job_definition.worker[0].retry_strategy[0].evaluate_on_exit : join("", [coalesce(rule.on_status_reason, "-"), coalesce(rule.on_reason, "-"), upper(rule.action)])] == ["Host EC2*-RETRY", "-*EXIT"]
    error_message = "Only a lost host is retried."
  }

  assert {
    condition     = jsondecode(aws_batch_job_definition.worker[0].container_properties).privileged && !can(jsondecode(aws_batch_job_definition.worker[0].container_properties).volumes)
    error_message = "Privileged, on the image's own anonymous volume."
  }

  assert {
    condition     = aws_ecr_repository.worker.image_tag_mutability == "IMMUTABLE" && aws_ecr_repository.worker.image_scanning_configuration[0].scan_on_push && [for rule in jsondecode(aws_ecr_lifecycle_policy.worker.policy).rules : rule.selection.tagStatus] == ["untagged"]
    error_message = "Tags never move, images are scanned, only untagged ones expire."
  }

  assert {
    condition     = aws_cloudwatch_log_group.batch[0].retention_in_days == 365
    error_message = "Logs of Batch jobs go after a year."
  }

  # Secrets

  assert {
    condition     = alltrue([for parameter in aws_ssm_parameter.secret : parameter.type == "SecureString" && parameter.value_wo_version == 1]) && keys(aws_ssm_parameter.secret) == ["ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GROQ_API_KEY", "HF_TOKEN", "MISTRAL_API_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY"]
    error_message = "Keys are SecureStrings whose value is write-only."
  }

  # Observability

  assert {
    condition     = length(aws_budgets_budget.this) == 0 && length(aws_sns_topic_subscription.email) == 0
    error_message = "No budget and no e-mail unless asked for."
  }

  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.batch_failed[0].event_pattern).detail.status == ["FAILED"] && aws_cloudwatch_event_rule.batch_failed[0].event_bus_name == "default"
    error_message = "Failed Batch jobs are heard on the default bus."
  }
}

run "private_network" {
  command = plan

  variables {
    private_network    = true
    ssm_access         = true
    kms_key_arn        = "arn:aws:kms:eu-west-2:123456789012:key/0aaa"
    availability_zones = 2
    tags               = { "cost-centre" = "evals" }
    alarm_email        = "evals@example.org"
    monthly_budget_usd = 200
    retention_days     = { partial = 3 }
    lanes              = 2
  }

  assert {
    condition     = length(aws_internet_gateway.this) == 0 && length(aws_route.internet) == 0 && alltrue([for subnet in aws_subnet.worker : !subnet.map_public_ip_on_launch]) && length(aws_subnet.worker) == 2
    error_message = "There is no way to the internet."
  }

  assert {
    condition     = join(" ", keys(aws_vpc_endpoint.interface)) == "ec2 ec2messages ecr.api ecr.dkr ecs ecs-agent ecs-telemetry logs sqs ssm ssmmessages sts"
    error_message = "Each service that a worker or a Batch host calls has an endpoint."
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.endpoints) == 1 && aws_vpc_security_group_ingress_rule.endpoints[0].from_port == 443 && aws_vpc_security_group_ingress_rule.endpoints[0].to_port == 443 && aws_vpc_security_group_ingress_rule.endpoints[0].referenced_security_group_id == "sg-0aaa" && aws_vpc_security_group_ingress_rule.endpoints[0].cidr_ipv4 == null
    error_message = "Endpoints accept HTTPS from workers and nothing else; no machine accepts anything."
  }

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this[0].rule).apply_server_side_encryption_by_default[0].sse_algorithm == "aws:kms" && aws_launch_template.worker["x86_64"].block_device_mappings[0].ebs[0].kms_key_id == var.kms_key_arn
    error_message = "The key encrypts bucket and disks."
  }

  assert {
    condition     = length([for statement in jsondecode(data.aws_iam_policy_document.worker.json).Statement : 1 if contains(["BucketKey", "Sessions", "SessionsRegister"], statement.Sid)]) == 3
    error_message = "Workers may use the key and register for sessions."
  }

  assert {
    condition = { for statement in jsondecode(data.aws_iam_policy_document.researcher.json).Statement : statement.Sid => [statement.Action, statement.Resource, try(statement.Condition, null)] if strcontains(jsonencode(statement.Action), "kms:") } == {
      Key     = [["kms:ReEncryptTo", "kms:ReEncryptFrom", "kms:GenerateDataKeyWithoutPlaintext", "kms:GenerateDataKey", "kms:DescribeKey", "kms:Decrypt"], var.kms_key_arn, null]
      DiskKey = ["kms:CreateGrant", var.kms_key_arn, { Bool = { "kms:GrantIsForAWSResource" = "true" } }]
    }
    error_message = "Who launches may do with the key what EC2 asks for the disks in their name, and grant it to AWS services alone."
  }

  assert {
    condition     = one(one(aws_budgets_budget.this[0].cost_filter).values) == "user:inspect-fleet$default" && length(aws_budgets_budget.this[0].notification) == 3 && aws_sns_topic_subscription.email[0].endpoint == "evals@example.org"
    error_message = "The budget counts this estate's tag; the address gets the topic's messages."
  }

  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : rule.expiration[0].days if rule.id == "partial"] == [3]
    error_message = "Retention is as given."
  }

  assert {
    condition     = [for spec in aws_launch_template.worker["x86_64"].tag_specifications : spec.tags["cost-centre"]] == ["evals", "evals", "evals"]
    error_message = "Tags of one's own are on instances too."
  }
}

run "existing_network_and_bucket" {
  command = plan

  variables {
    vpc_id              = "vpc-0bbb"
    subnet_ids          = ["subnet-0bbb"]
    bucket_name         = "our-logs"
    use_existing_bucket = true
  }

  override_data {
    target = data.aws_subnet.existing
    values = { id = "subnet-0bbb" }
  }

  override_data {
    target = data.aws_s3_bucket.existing
    values = { id = "our-logs" }
  }

  assert {
    condition     = length(aws_vpc.this) + length(aws_subnet.worker) + length(aws_vpc_endpoint.s3) + length(aws_vpc_endpoint.interface) == 0
    error_message = "Nothing is made in a network that is not ours."
  }

  assert {
    condition     = aws_security_group.worker.vpc_id == "vpc-0bbb" && one(local.subnet_ids) == "subnet-0bbb"
    error_message = "Workers start in the given subnets."
  }

  assert {
    condition     = length(aws_s3_bucket.this) + length(aws_s3_bucket_policy.this) + length(aws_s3_bucket_lifecycle_configuration.this) == 0 && local.bucket == "our-logs"
    error_message = "An existing bucket stays as it is."
  }

  assert {
    condition     = alltrue([for statement in jsondecode(data.aws_iam_policy_document.worker.json).Statement : alltrue([for resource in flatten([statement.Resource]) : startswith(resource, "arn:aws:s3:::our-logs")]) if startswith(flatten([statement.Action])[0], "s3:")])
    error_message = "The policies name the existing bucket."
  }
}

run "without_batch_and_keys" {
  command = plan

  variables {
    batch        = { enabled = false }
    secret_names = []
  }

  assert {
    condition     = alltrue([for statement in jsondecode(data.aws_iam_policy_document.worker.json).Statement : can(statement.Resource)]) && length(aws_ssm_parameter.secret) == 0
    error_message = "Without keys, every statement still says what it is about: IAM refuses one that doesn't."
  }

  assert {
    condition     = length(aws_batch_compute_environment.this) + length(aws_batch_job_queue.this) + length(aws_batch_job_definition.worker) + length(aws_launch_template.batch) + length(aws_iam_role.batch_job) + length(aws_cloudwatch_event_rule.batch_failed) == 0
    error_message = "Nothing of Batch is made."
  }

  assert {
    condition     = local.config.batch == null && !local.batch
    error_message = "The configuration says that there is none."
  }
}

run "arm64" {
  command = plan

  variables {
    instance_types = ["m7g.large", "m7i.large", "m6g.large"]
  }

  override_data {
    target = data.aws_ec2_instance_types.worker["x86_64"]
    values = { instance_types = ["m7i.large"] }
  }

  override_data {
    target = data.aws_ec2_instance_types.worker["arm64"]
    values = { instance_types = ["m6g.large", "m7g.large"] }
  }

  assert {
    condition     = keys(aws_launch_template.worker) == ["arm64", "x86_64"] && aws_launch_template.worker["arm64"].image_id == "resolve:ssm:/inspect-fleet/default/image/arm64"
    error_message = "Each architecture has its template and its image."
  }

  assert {
    condition     = jsonencode(local.config.workers.instance_types) == jsonencode({ arm64 = ["m7g.large", "m6g.large"], x86_64 = ["m7i.large"] }) && join(" ", local.batch_types) == "m7g.large m6g.large"
    error_message = "Types stay in the order of preference; Batch takes those of the preferred architecture."
  }
}

# Every variable that makes a policy or the parameter longer, at its longest, in a region with the longest name.
run "largest" {
  command = plan

  variables {
    name           = "a-name-of-20-letters"
    lanes          = 16
    vpc_id         = "vpc-0123456789abcdef0"
    subnet_ids     = [for number in range(6) : format("subnet-%017x", number)]
    bucket_name    = "a-bucket-whose-name-is-as-long-as-the-rules-of-s3-allow-it-to-b"
    kms_key_arn    = "arn:aws:kms:ap-southeast-4:123456789012:key/mrk-0123456789abcdef0123456789abcdef"
    ssm_access     = true
    instance_types = ["m7g.large", "m7i.large"]
    secret_names   = ["ANTHROPIC_API_KEY"]
  }

  override_data {
    target = data.aws_region.current
    values = { id = "ap-southeast-4" }
  }

  override_data {
    target = data.aws_ec2_instance_types.worker["x86_64"]
    values = { instance_types = ["m7i.large"] }
  }

  override_data {
    target = data.aws_ec2_instance_types.worker["arm64"]
    values = { instance_types = ["m7g.large"] }
  }

  override_data {
    target = data.aws_subnet.existing
    values = { id = "subnet-0123456789abcdef0" }
  }

  override_resource {
    target          = aws_security_group.worker
    override_during = plan
    values          = { id = "sg-0123456789abcdef0" }
  }

  override_resource {
    target          = module.lane.aws_sqs_queue.jobs
    override_during = plan
    values          = { url = "https://sqs.ap-southeast-4.amazonaws.com/123456789012/inspect-fleet-a-name-of-20-letters-lane-01-jobs" }
  }

  override_resource {
    target          = module.lane.aws_sqs_queue.events
    override_during = plan
    values          = { url = "https://sqs.ap-southeast-4.amazonaws.com/123456789012/inspect-fleet-a-name-of-20-letters-lane-01-events" }
  }

  override_resource {
    target          = module.lane.aws_sqs_queue.dead
    override_during = plan
    values          = { arn = "arn:aws:sqs:eu-west-2:123456789012:dead", url = "https://sqs.ap-southeast-4.amazonaws.com/123456789012/inspect-fleet-a-name-of-20-letters-lane-01-dead" }
  }

  assert {
    condition     = length(module.lane) == 16 && length(aws_iam_policy.people) == 5
    error_message = "Sixteen lanes, five policies."
  }

  assert {
    condition = alltrue([for document in concat([data.aws_iam_policy_document.researcher.json, data.aws_iam_policy_document.ci.json], [for part in data.aws_iam_policy_document.operator : part.json]) :
    length(replace(document, "/\\s/", "")) <= 6144])
    error_message = "IAM takes 6144 characters in a managed policy: ${join(" ", [for document in concat([data.aws_iam_policy_document.researcher.json, data.aws_iam_policy_document.ci.json], [for part in data.aws_iam_policy_document.operator : part.json]) : length(replace(document, "/\\s/", ""))])}"
  }

  assert {
    condition     = length(replace(data.aws_iam_policy_document.worker.json, "/\\s/", "")) <= 10240
    error_message = "IAM takes 10240 characters in a role's own policies."
  }

  assert {
    condition     = strcontains(data.aws_iam_policy_document.researcher.json, "arn:aws:sqs:ap-southeast-4:123456789012:inspect-fleet-a-name-of-20-letters-lane-??-jobs")
    error_message = "The policy speaks of this estate's lanes."
  }
}

run "lane" {
  command = plan

  module {
    source = "./modules/lane"
  }

  variables {
    name      = "inspect-fleet-default-lane-01"
    arn       = "arn:aws:sqs:eu-west-2:123456789012:inspect-fleet-default-lane-01"
    account   = "123456789012"
    topic_arn = "arn:aws:sns:eu-west-2:123456789012:inspect-fleet-default"
  }

  override_resource {
    target          = aws_sqs_queue.dead
    override_during = plan
    values          = { arn = "arn:aws:sqs:eu-west-2:123456789012:inspect-fleet-default-lane-01-dead" }
  }

  assert {
    condition     = alltrue([for queue in [aws_sqs_queue.jobs, aws_sqs_queue.events, aws_sqs_queue.dead] : queue.message_retention_seconds == 14 * 24 * 3600 && queue.sqs_managed_sse_enabled])
    error_message = "Messages are kept for fourteen days, encrypted."
  }

  assert {
    condition     = jsonencode(jsondecode(aws_sqs_queue.jobs.redrive_policy)) == jsonencode({ deadLetterTargetArn = "arn:aws:sqs:eu-west-2:123456789012:inspect-fleet-default-lane-01-dead", maxReceiveCount = 20 })
    error_message = "A job that twenty receives could not finish is a dead letter."
  }

  assert {
    condition = jsonencode(jsondecode(aws_sqs_queue.jobs.policy).Statement) == jsonencode([
      {
        Action    = "sqs:*"
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
        Effect    = "Deny"
        Principal = "*"
        Resource  = "arn:aws:sqs:eu-west-2:123456789012:inspect-fleet-default-lane-01-jobs"
        Sid       = "DenyPlainHttp"
      },
      {
        Action    = "sqs:*"
        Condition = { StringNotEquals = { "aws:PrincipalAccount" = "123456789012" } }
        Effect    = "Deny"
        Principal = "*"
        Resource  = "arn:aws:sqs:eu-west-2:123456789012:inspect-fleet-default-lane-01-jobs"
        Sid       = "DenyOtherAccounts"
      },
    ])
    error_message = "Plain HTTP and other accounts are refused."
  }

  assert {
    condition     = strcontains(aws_sqs_queue.events.policy, "DenyOtherAccounts") && strcontains(aws_sqs_queue.dead.policy, "DenyOtherAccounts")
    error_message = "On all three queues."
  }

  assert {
    condition     = aws_cloudwatch_metric_alarm.dead.threshold == 0 && aws_cloudwatch_metric_alarm.oldest.threshold == 21600
    error_message = "A dead letter, or a job that waits for six hours, calls a person."
  }
}

# Wrong input, stopped by the configuration itself.

run "lanes_0" {
  command = plan
  variables {
    lanes = 0
  }
  expect_failures = [var.lanes]
}

run "bad_cidr" {
  command = plan
  variables {
    vpc_cidr = "10.83.0.0/33"
  }
  expect_failures = [var.vpc_cidr]
}

run "cidr_too_small" {
  command = plan
  variables {
    vpc_cidr = "10.83.0.0/28"
  }
  expect_failures = [var.vpc_cidr]
}

run "tag_with_a_space" {
  command = plan
  variables {
    tags = { "cost centre" = "evals" }
  }
  expect_failures = [var.tags]
}

run "tag_of_ours" {
  command = plan
  variables {
    tags = { "fleet-id" = "x" }
  }
  expect_failures = [var.tags]
}

run "unknown_instance_type" {
  command = plan
  variables {
    instance_types = ["m7i.large", "m99x.large"]
  }
  expect_failures = [aws_launch_template.worker]
}

run "malformed_instance_type" {
  command = plan
  variables {
    instance_types = ["m7i"]
  }
  expect_failures = [var.instance_types]
}

run "subnets_without_vpc" {
  command = plan
  variables {
    subnet_ids = ["subnet-0bbb"]
  }
  expect_failures = [var.subnet_ids]
}

run "bad_digest" {
  command = plan
  variables {
    batch = { image_digest = "latest" }
  }
  expect_failures = [var.batch]
}

run "lifetime_of_a_month" {
  command = plan
  variables {
    max_lifetime_minutes = 43200
  }
  expect_failures = [var.max_lifetime_minutes]
}

run "names_that_fit_into_no_parameter" {
  command = plan
  variables {
    name         = "a-name-of-20-letters"
    lanes        = 16
    secret_names = [for number in range(50) : "SOME_PROVIDER_KEY_${number}"]
  }
  expect_failures = [aws_ssm_parameter.config]
}

run "too_many_subnets" {
  command = plan
  variables {
    vpc_id     = "vpc-0bbb"
    subnet_ids = [for number in range(7) : format("subnet-%017x", number)]
  }
  override_data {
    target = data.aws_subnet.existing
    values = { id = "subnet-0bbb" }
  }
  expect_failures = [var.subnet_ids]
}

run "disk_smaller_than_the_image" {
  command = plan
  variables {
    root_volume = { gb = 19 }
  }
  expect_failures = [var.root_volume]
}

run "disk_smaller_than_the_image_of_batch" {
  command = plan
  variables {
    batch = { root_volume_gb = 29 }
  }
  expect_failures = [var.batch]
}
