# What an operator needs to plan, apply and destroy this estate, to push keys and images and to build AMIs, and what CI needs.
# Attach all operator policies, and the researcher's, to an operator: a managed policy holds 6,144 characters at most. The
# first apply needs an administrator, because these policies do not exist before it.

locals {
  iam_arn   = "${local.arn}:iam::${local.account}"
  batch_arn = "${local.arn}:batch:${local.region}:${local.account}"
  logs_arn  = "${local.arn}:logs:${local.region}:${local.account}:log-group"

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
      # Ids are not known before: the ARN ends at the kind, and what exists must carry the estate's tag or be ours to make.
      Network = {
        on   = [for kind in ["internet-gateway", "route-table", "security-group", "security-group-rule", "subnet", "vpc", "vpc-endpoint"] : "${local.ec2_arn}:${kind}/*"]
        read = ["ec2:DescribeVpcAttribute"]
        change = [for what in ["AssociateRouteTable", "AttachInternetGateway", "AuthorizeSecurityGroupEgress", "AuthorizeSecurityGroupIngress",
          "CreateInternetGateway", "CreateRoute", "CreateRouteTable", "CreateSecurityGroup", "CreateSubnet", "CreateVpc", "CreateVpcEndpoint",
          "DeleteInternetGateway", "DeleteRoute", "DeleteRouteTable", "DeleteSecurityGroup", "DeleteSubnet", "DeleteVpc", "DeleteVpcEndpoints",
          "DetachInternetGateway", "DisassociateRouteTable", "ModifySubnetAttribute", "ModifyVpcAttribute", "ModifyVpcEndpoint", "RevokeSecurityGroupEgress",
        "RevokeSecurityGroupIngress"] : "ec2:${what}"]
      }
      Images = {
        on     = ["${local.ec2_arn}:instance/*"]
        read   = ["ec2:GetInstanceUefiData"]
        change = []
      }
      # `ct cloud clean-amis`: old images with their snapshots, and what a killed build left. Images and snapshots have no account.
      OldImages = {
        on     = ["${local.ec2_arn}:key-pair/*", "${local.arn}:ec2:${local.region}::image/*", "${local.arn}:ec2:${local.region}::snapshot/*"]
        read   = []
        change = ["ec2:DeleteKeyPair", "ec2:DeleteSnapshot", "ec2:DeregisterImage"]
      }
      Templates = {
        on     = ["${local.ec2_arn}:launch-template/*"]
        read   = []
        change = ["ec2:CreateLaunchTemplate", "ec2:CreateLaunchTemplateVersion", "ec2:DeleteLaunchTemplate", "ec2:ModifyLaunchTemplate"]
      }
      Tags = {
        on     = ["${local.ec2_arn}:*/*"]
        read   = []
        change = ["ec2:CreateTags", "ec2:DeleteTags"]
      }
      Batch = {
        on   = ["${local.batch_arn}:compute-environment/terraform-*", "${local.batch_arn}:job-queue/${local.prefix}-*", "${local.batch_arn}:job-definition/${local.prefix}-*"]
        read = ["batch:ListTagsForResource"]
        change = ["batch:CreateComputeEnvironment", "batch:CreateJobQueue", "batch:DeleteComputeEnvironment", "batch:DeleteJobQueue",
        "batch:RegisterJobDefinition", "batch:TagResource", "batch:UntagResource", "batch:UpdateComputeEnvironment", "batch:UpdateJobQueue"]
      }
    }

    # What Packer's amazon-ebs builder calls for `ct cloud build-ami`, of what it is documented to need: volumes and images of other
    # builders, copies, shares and Windows are left out. What it makes carries the run_tags of packer/worker.pkr.hcl from its first moment
    # on, and only what carries them may be stopped, changed or ended; an image gets them after it has been made. Keys, groups and
    # the way back (old images, snapshots, keys) are above.
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
        change = ["ec2:CreateKeyPair"]
      }
      BuildMachine = {
        on     = ["${local.ec2_arn}:instance/*", "${local.ec2_arn}:volume/*"]
        read   = []
        change = ["ec2:CreateImage", "ec2:DeleteVolume", "ec2:ModifyInstanceAttribute", "ec2:StopInstances", "ec2:TerminateInstances"]
        where  = { "aws:ResourceTag/inspect-fleet-image" = var.name }
      }
      NewImage = {
        on     = ["${local.arn}:ec2:${local.region}::image/*", "${local.arn}:ec2:${local.region}::snapshot/*"]
        read   = ["ec2:DescribeImageAttribute"]
        change = ["ec2:CreateImage", "ec2:EnableImageDeprecation", "ec2:ModifyImageAttribute"]
      }
      TagImage = {
        on     = ["${local.arn}:ec2:${local.region}::image/*", "${local.arn}:ec2:${local.region}::snapshot/*"]
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
        on     = ["${local.queue_arn}-lane-*"]
        read   = ["sqs:GetQueueAttributes", "sqs:ListQueueTags"]
        change = ["sqs:CreateQueue", "sqs:DeleteQueue", "sqs:SetQueueAttributes", "sqs:TagQueue", "sqs:UntagQueue"]
      }
      Roles = {
        on = ["${local.roles_arn}-*", "${local.iam_arn}:instance-profile/${local.prefix}-*", "${local.iam_arn}:policy/${local.prefix}-*"]
        read = [for what in ["GetInstanceProfile", "GetPolicy", "GetPolicyVersion", "GetRole", "GetRolePolicy", "ListAttachedRolePolicies",
        "ListInstanceProfilesForRole", "ListPolicyVersions", "ListRolePolicies"] : "iam:${what}"]
        change = [for what in ["AddRoleToInstanceProfile", "AttachRolePolicy", "CreateInstanceProfile", "CreatePolicy", "CreatePolicyVersion", "CreateRole",
          "DeleteInstanceProfile", "DeletePolicy", "DeletePolicyVersion", "DeleteRole", "DeleteRolePolicy", "DetachRolePolicy", "PassRole", "PutRolePolicy",
        "RemoveRoleFromInstanceProfile", "TagInstanceProfile", "TagPolicy", "TagRole", "UntagRole", "UpdateAssumeRolePolicy"] : "iam:${what}"]
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
      Alarms = {
        on     = ["${local.arn}:cloudwatch:${local.region}:${local.account}:alarm:*", "${local.arn}:cloudwatch::${local.account}:dashboard/${local.prefix}"]
        read   = ["cloudwatch:DescribeAlarms", "cloudwatch:GetDashboard", "cloudwatch:ListTagsForResource"]
        change = ["cloudwatch:DeleteAlarms", "cloudwatch:DeleteDashboards", "cloudwatch:PutDashboard", "cloudwatch:PutMetricAlarm", "cloudwatch:TagResource"]
      }
      Rules = {
        on     = ["${local.arn}:events:${local.region}:${local.account}:rule/${local.prefix}-*"]
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
          test     = "StringEquals"
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
