# What an operator needs to plan, apply and destroy this estate, to push keys and images and to build AMIs, and what CI needs.
# Attach all operator policies, and the researcher's, to an operator: a managed policy holds 6,144 characters at most. The
# first apply needs an administrator, because these policies do not exist before it.

locals {
  iam_arn   = "${local.arn}:iam::${local.account}"
  batch_arn = "${local.arn}:batch:${local.region}:${local.account}"
  logs_arn  = "${local.arn}:logs:${local.region}:${local.account}:log-group"

  alarms_arn = "${local.arn}:cloudwatch:${local.region}:${local.account}:alarm"
  network    = ["internet-gateway", "route-table", "security-group", "subnet", "vpc", "vpc-endpoint"]

  # With whole names: an estate `default` is not to match what belongs to one that is called `default-2`.
  batch_arns = [for name in ["job-queue/${local.prefix}-spot", "job-queue/${local.prefix}-on-demand", "job-definition/${local.prefix}-worker",
  "job-definition/${local.prefix}-worker:*"] : "${local.batch_arn}:${name}"]

  estate = {
    machines = {
      # Reading the network and templates takes no ARN.
      Look = {
        on = ["*"]
        read = concat(
          [for what in ["AvailabilityZones", "Images", "InstanceTypes", "InternetGateways", "KeyPairs", "LaunchTemplates", "LaunchTemplateVersions", "NetworkAcls",
          "NetworkInterfaces", "PrefixLists", "RouteTables", "SecurityGroups", "SecurityGroupRules", "Snapshots", "Subnets", "VpcEndpoints", "Vpcs"] : "ec2:Describe${what}"],
          ["batch:DescribeComputeEnvironments", "batch:DescribeJobDefinitions", "batch:DescribeJobQueues"],
          ["ssm:DescribeParameters", "ecr:GetAuthorizationToken"],
        )
        change = ["batch:DeregisterJobDefinition"]
      }
      # Ids are not known before, so that ARNs end at the kind. Anybody may make; what exists must carry the estate's tag, which all
      # that Terraform makes has from its first moment on. A rule that is being made has no tag yet, and belongs to a group that has.
      NewNetwork = {
        on     = [for kind in local.network : "${local.ec2_arn}:${kind}/*"]
        read   = ["ec2:DescribeVpcAttribute"]
        change = [for what in ["InternetGateway", "RouteTable", "SecurityGroup", "Subnet", "Vpc", "VpcEndpoint"] : "ec2:Create${what}"]
      }
      NewRules = {
        on     = ["${local.ec2_arn}:security-group-rule/*"]
        read   = []
        change = ["ec2:AuthorizeSecurityGroupEgress", "ec2:AuthorizeSecurityGroupIngress"]
      }
      OwnNetwork = {
        on   = [for kind in concat(local.network, ["security-group-rule"]) : "${local.ec2_arn}:${kind}/*"]
        read = []
        change = [for what in ["AssociateRouteTable", "AttachInternetGateway", "AuthorizeSecurityGroupEgress", "AuthorizeSecurityGroupIngress", "CreateRoute",
          "DeleteInternetGateway", "DeleteRoute", "DeleteRouteTable", "DeleteSecurityGroup", "DeleteSubnet", "DeleteVpc", "DeleteVpcEndpoints",
          "DetachInternetGateway", "DisassociateRouteTable", "ModifySubnetAttribute", "ModifyVpcAttribute", "ModifyVpcEndpoint", "RevokeSecurityGroupEgress",
        "RevokeSecurityGroupIngress"] : "ec2:${what}"]
        where = { "aws:ResourceTag/inspect-fleet" = var.name }
      }
      Images = {
        on     = ["${local.ec2_arn}:instance/*"]
        read   = ["ec2:GetInstanceUefiData"]
        change = []
      }
      NewTemplates = {
        on     = ["${local.ec2_arn}:launch-template/*"]
        read   = []
        change = ["ec2:CreateLaunchTemplate"]
      }
      OwnTemplates = {
        on     = ["${local.ec2_arn}:launch-template/*"]
        read   = []
        change = ["ec2:CreateLaunchTemplateVersion", "ec2:DeleteLaunchTemplate", "ec2:ModifyLaunchTemplate"]
        where  = { "aws:ResourceTag/inspect-fleet" = var.name }
      }
      # A tag opens what the statements here allow for it. It is given to what is just being made, by any call, and changed on what has
      # the estate's; a VPC's default group alone gets it afterwards, because AWS makes that one without tags.
      TagNew = {
        on     = ["${local.ec2_arn}:*/*"]
        read   = []
        change = ["ec2:CreateTags"]
        where  = { "ec2:CreateAction" = "*" }
      }
      TagOwn = {
        on     = ["${local.ec2_arn}:*/*"]
        read   = []
        change = ["ec2:CreateTags", "ec2:DeleteTags"]
        where  = { "aws:ResourceTag/inspect-fleet" = var.name }
      }
      TagDefaultGroup = {
        on     = ["${local.ec2_arn}:security-group/*"]
        read   = []
        change = ["ec2:CreateTags"]
        where  = { "aws:RequestTag/inspect-fleet" = var.name }
      }
      Batch = {
        on   = concat(["${local.batch_arn}:compute-environment/terraform-*"], local.batch_arns)
        read = ["batch:ListTagsForResource"]
        change = ["batch:CreateComputeEnvironment", "batch:CreateJobQueue", "batch:DeleteComputeEnvironment", "batch:DeleteJobQueue",
        "batch:RegisterJobDefinition", "batch:TagResource", "batch:UntagResource", "batch:UpdateComputeEnvironment", "batch:UpdateJobQueue"]
      }
      Roles = {
        on = concat(
          [for name in ["batch-host", "batch-job", "worker"] : "${local.roles_arn}-${name}"],
          [for name in ["batch-host", "worker"] : "${local.iam_arn}:instance-profile/${local.prefix}-${name}"],
          [for name in ["ci", "operator-images", "operator-machines", "operator-resources", "researcher"] : "${local.iam_arn}:policy/${local.prefix}-${name}"],
        )
        read = [for what in ["GetInstanceProfile", "GetPolicy", "GetPolicyVersion", "GetRole", "GetRolePolicy", "ListAttachedRolePolicies",
        "ListInstanceProfilesForRole", "ListPolicyVersions", "ListRolePolicies"] : "iam:${what}"]
        change = [for what in ["AddRoleToInstanceProfile", "AttachRolePolicy", "CreateInstanceProfile", "CreatePolicy", "CreatePolicyVersion", "CreateRole",
          "DeleteInstanceProfile", "DeletePolicy", "DeletePolicyVersion", "DeleteRole", "DeleteRolePolicy", "DetachRolePolicy", "PassRole", "PutRolePolicy",
        "RemoveRoleFromInstanceProfile", "TagInstanceProfile", "TagPolicy", "TagRole", "UntagRole", "UpdateAssumeRolePolicy"] : "iam:${what}"]
      }
    }

    # What Packer's amazon-ebs builder calls for `ct cloud build-ami`, of what it is documented to need: volumes and images of other
    # builders, copies, shares and Windows are left out. What it makes carries the run_tags of packer/worker.pkr.hcl from its first moment
    # on, and only what carries them may be stopped, changed or ended; an image, and a group of Packer 1.6, get them after they have been
    # made. Keys have names.
    images = {
      LookAtBuild = {
        on     = ["*"]
        read   = [for what in ["Instances", "InstanceStatus", "Regions", "Tags", "Volumes"] : "ec2:Describe${what}"]
        change = []
      }
      LaunchTagged = {
        on     = ["${local.ec2_arn}:instance/*", "${local.ec2_arn}:volume/*"]
        read   = []
        change = ["ec2:RunInstances"]
        where  = { "aws:RequestTag/inspect-fleet-image" = var.name }
      }
      LaunchWith = {
        on = concat(
          [for kind in ["network-interface/*", "security-group/*", "subnet/*", "key-pair/packer_inspect-fleet-*"] : "${local.ec2_arn}:${kind}"],
          ["${local.arn}:ec2:${local.region}::image/*"],
        )
        read   = []
        change = ["ec2:RunInstances"]
      }
      BuildKey = {
        on     = ["${local.ec2_arn}:key-pair/packer_inspect-fleet-*"]
        read   = []
        change = ["ec2:CreateKeyPair", "ec2:DeleteKeyPair"]
      }
      # Packer 1.6 opens the port of its group before anybody can have tagged it.
      OpenGroup = {
        on     = ["${local.ec2_arn}:security-group/*"]
        read   = []
        change = ["ec2:AuthorizeSecurityGroupIngress"]
      }
      BuildMachine = {
        on     = [for kind in ["instance", "security-group", "volume"] : "${local.ec2_arn}:${kind}/*"]
        read   = []
        change = ["ec2:CreateImage", "ec2:DeleteSecurityGroup", "ec2:DeleteVolume", "ec2:ModifyInstanceAttribute", "ec2:StopInstances", "ec2:TerminateInstances"]
        where  = { "aws:ResourceTag/inspect-fleet-image" = var.name }
      }
      NewImage = {
        on     = ["${local.arn}:ec2:${local.region}::image/*", "${local.arn}:ec2:${local.region}::snapshot/*"]
        read   = ["ec2:DescribeImageAttribute"]
        change = ["ec2:CreateImage", "ec2:EnableImageDeprecation", "ec2:ModifyImageAttribute"]
      }
      # `ct cloud clean-amis`: old images with their snapshots, and what a killed build left, which has no tag yet. They have no account.
      OldImages = {
        on     = ["${local.arn}:ec2:${local.region}::image/*", "${local.arn}:ec2:${local.region}::snapshot/*"]
        read   = []
        change = ["ec2:DeleteSnapshot", "ec2:DeregisterImage"]
      }
      TagBuilt = {
        on     = ["${local.ec2_arn}:security-group/*", "${local.arn}:ec2:${local.region}::image/*", "${local.arn}:ec2:${local.region}::snapshot/*"]
        read   = []
        change = ["ec2:CreateTags"]
        where  = { "aws:RequestTag/inspect-fleet-image" = var.name }
      }
    }

    resources = {
      Bucket = {
        on = [local.bucket_arn]
        read = [for what in ["GetAccelerateConfiguration", "GetBucketAcl", "GetBucketCORS", "GetBucketLogging", "GetBucketObjectLockConfiguration",
          "GetBucketOwnershipControls", "GetBucketPolicy", "GetBucketPublicAccessBlock", "GetBucketRequestPayment", "GetBucketTagging",
          "GetBucketVersioning", "GetBucketWebsite", "GetEncryptionConfiguration", "GetLifecycleConfiguration", "GetReplicationConfiguration",
        "ListBucket"] : "s3:${what}"]
        change = [for what in ["CreateBucket", "DeleteBucket", "DeleteBucketPolicy", "ListBucketVersions", "PutBucketOwnershipControls", "PutBucketPolicy",
        "PutBucketPublicAccessBlock", "PutBucketTagging", "PutBucketVersioning", "PutEncryptionConfiguration", "PutLifecycleConfiguration"] : "s3:${what}"]
      }
      Objects = {
        on     = ["${local.bucket_arn}/*"]
        read   = []
        change = ["s3:DeleteObject", "s3:DeleteObjectVersion"]
      }
      LaneRecords = {
        on     = ["${local.bucket_arn}/lanes/*"]
        read   = ["s3:GetObject"]
        change = ["s3:PutObject"]
      }
      Queues = {
        on     = values(local.lane_arns)
        read   = ["sqs:GetQueueAttributes", "sqs:ListQueueTags"]
        change = ["sqs:CreateQueue", "sqs:DeleteQueue", "sqs:SetQueueAttributes", "sqs:TagQueue", "sqs:UntagQueue"]
      }
      BatchOwnRole = {
        on     = ["${local.iam_arn}:role/aws-service-role/batch.amazonaws.com/*"]
        read   = []
        change = ["iam:CreateServiceLinkedRole"]
      }
      Parameters = {
        on     = ["${local.ssm_arn}/*"]
        read   = ["ssm:GetParameter", "ssm:GetParameters", "ssm:ListTagsForResource"]
        change = ["ssm:AddTagsToResource", "ssm:DeleteParameter", "ssm:PutParameter", "ssm:RemoveTagsFromResource"]
      }
      Registry = {
        on     = [local.repository_arn]
        read   = ["ecr:DescribeRepositories", "ecr:GetLifecyclePolicy", "ecr:ListTagsForResource"]
        change = concat(["ecr:CreateRepository", "ecr:DeleteLifecyclePolicy", "ecr:DeleteRepository", "ecr:PutLifecyclePolicy", "ecr:TagResource"], local.push)
      }
      Logs = {
        on     = ["${local.logs_arn}:${local.path}/*"]
        read   = ["logs:ListTagsForResource"]
        change = ["logs:CreateLogGroup", "logs:DeleteLogGroup", "logs:PutRetentionPolicy", "logs:TagResource"]
      }
      LogGroups = {
        on     = ["${local.logs_arn}:*"]
        read   = ["logs:DescribeLogGroups"]
        change = []
      }
      Topic = {
        on     = [local.topic_arn]
        read   = ["sns:GetTopicAttributes", "sns:ListTagsForResource", "sns:GetSubscriptionAttributes"]
        change = ["sns:CreateTopic", "sns:DeleteTopic", "sns:SetTopicAttributes", "sns:Subscribe", "sns:TagResource", "sns:Unsubscribe"]
      }
      AllAlarms = {
        on     = ["${local.alarms_arn}:*"]
        read   = ["cloudwatch:DescribeAlarms"]
        change = []
      }
      Alarms = {
        on = concat(
          [for name in ["instances-past-deadline", "lane-??-dead-letters", "lane-??-oldest-job"] : "${local.alarms_arn}:${local.prefix}-${name}"],
          ["${local.arn}:cloudwatch::${local.account}:dashboard/${local.prefix}"],
        )
        read   = ["cloudwatch:GetDashboard", "cloudwatch:ListTagsForResource"]
        change = ["cloudwatch:DeleteAlarms", "cloudwatch:DeleteDashboards", "cloudwatch:PutDashboard", "cloudwatch:PutMetricAlarm", "cloudwatch:TagResource"]
      }
      Rules = {
        on     = ["${local.arn}:events:${local.region}:${local.account}:rule/${local.prefix}-batch-failed"]
        read   = ["events:DescribeRule", "events:ListTagsForResource", "events:ListTargetsByRule"]
        change = ["events:DeleteRule", "events:PutRule", "events:PutTargets", "events:RemoveTargets", "events:TagResource"]
      }
      Budget = {
        on     = ["${local.arn}:budgets::${local.account}:budget/${local.prefix}"]
        read   = ["budgets:ListTagsForResource", "budgets:ViewBudget"]
        change = ["budgets:ModifyBudget", "budgets:TagResource"]
      }
    }
  }

  push = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart"]
}

data "aws_iam_policy_document" "operator" {
  for_each = local.estate

  dynamic "statement" {
    for_each = each.value

    content {
      sid       = statement.key
      actions   = concat(statement.value.read, statement.value.change)
      resources = statement.value.on

      dynamic "condition" {
        for_each = try(statement.value.where, {})

        content {
          test     = "StringLike"
          variable = condition.key
          values   = [condition.value]
        }
      }
    }
  }
}

# CI plans with -refresh=false: a refresh decrypts every parameter, and CI is not to read keys. It pushes the worker image.
data "aws_iam_policy_document" "ci" {
  statement {
    sid       = "Plan"
    actions   = ["ec2:DescribeAvailabilityZones", "ec2:DescribeImages", "ec2:DescribeInstanceTypes", "ecr:GetAuthorizationToken"]
    resources = ["*"]
  }

  statement {
    sid       = "Images"
    actions   = ["ec2:GetInstanceUefiData"]
    resources = ["${local.ec2_arn}:instance/*"]
  }

  statement {
    sid       = "PushImage"
    actions   = local.push
    resources = [local.repository_arn]
  }
}
