# What tells a person: a topic, alarms, a dashboard, a budget by choice. Nine alarms, as by default, are within the free ten.

resource "aws_sns_topic" "this" {
  #checkov:skip=CKV_AWS_26:With the free AWS managed key, CloudWatch and EventBridge could not publish; the messages hold no secret.
  name = local.prefix
}

data "aws_iam_policy_document" "topic" {
  statement {
    sid       = "AlarmsAndBudget"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.this.arn]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }

  # EventBridge sends no account with what it publishes to a topic, so that a condition would stop it.
  statement {
    sid       = "Events"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.this.arn]

    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com"]
    }
  }

  statement {
    sid       = "DenyPlainHttp"
    effect    = "Deny"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.this.arn]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_sns_topic_policy" "this" {
  arn    = aws_sns_topic.this.arn
  policy = data.aws_iam_policy_document.topic.json
}

resource "aws_sns_topic_subscription" "email" {
  count     = var.alarm_email == null ? 0 : 1
  topic_arn = aws_sns_topic.this.arn
  protocol  = "email"
  endpoint  = var.alarm_email
}

# `ct fleet reap` publishes the metric; no data means that nobody reaps, and then no instance is known to be late either.
resource "aws_cloudwatch_metric_alarm" "overdue" {
  alarm_name          = "${local.prefix}-instances-past-deadline"
  alarm_description   = "Instances run past their fleet's deadline. `ct fleet reap` ends them."
  namespace           = local.metrics
  metric_name         = "InstancesPastDeadline"
  dimensions          = { Estate = var.name }
  statistic           = "Maximum"
  period              = 900
  evaluation_periods  = 2
  threshold           = 0
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.this.arn]
}

resource "aws_cloudwatch_event_rule" "batch_failed" {
  count       = local.batch ? 1 : 0
  name        = "${local.prefix}-batch-failed"
  description = "A Batch job of this estate failed"

  # Batch sends its events to the default bus and to no other.
  event_pattern = jsonencode({
    source      = ["aws.batch"]
    detail-type = ["Batch Job State Change"]
    detail      = { status = ["FAILED"], jobQueue = [for queue in aws_batch_job_queue.this : queue.arn] }
  })
}

resource "aws_cloudwatch_event_target" "batch_failed" {
  count = local.batch ? 1 : 0
  rule  = aws_cloudwatch_event_rule.batch_failed[0].name
  arn   = aws_sns_topic.this.arn

  input_transformer {
    input_paths    = { job = "$.detail.jobId", name = "$.detail.jobName", reason = "$.detail.statusReason" }
    input_template = "\"Batch job <name> (<job>) failed: <reason>. See `ies batch monitor-job <job>`.\""
  }
}

resource "aws_cloudwatch_dashboard" "this" {
  dashboard_name = local.prefix

  dashboard_body = jsonencode({
    widgets = [
      for index, panel in [
        { title = "Jobs waiting", namespace = "AWS/SQS", metric = "ApproximateNumberOfMessagesVisible", queue = "jobs" },
        { title = "Jobs running", namespace = "AWS/SQS", metric = "ApproximateNumberOfMessagesNotVisible", queue = "jobs" },
        { title = "Events not read yet", namespace = "AWS/SQS", metric = "ApproximateNumberOfMessagesVisible", queue = "events" },
        { title = "Dead letters", namespace = "AWS/SQS", metric = "ApproximateNumberOfMessagesVisible", queue = "dead" },
        ] : {
        type = "metric", x = (index % 2) * 12, y = floor(index / 2) * 6, width = 12, height = 6
        properties = {
          title   = panel.title
          region  = local.region
          stat    = "Maximum"
          period  = 60
          metrics = [for lane in keys(local.lanes) : [panel.namespace, panel.metric, "QueueName", "${local.prefix}-${lane}-${panel.queue}", { label = lane }]]
        }
      }
    ]
  })
}

resource "aws_budgets_budget" "this" {
  count        = var.monthly_budget_usd == null ? 0 : 1
  name         = local.prefix
  budget_type  = "COST"
  limit_amount = tostring(var.monthly_budget_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  cost_filter {
    name   = "TagKeyValue"
    values = [format("user:inspect-fleet$%s", var.name)]
  }

  dynamic "notification" {
    for_each = [["ACTUAL", 80], ["ACTUAL", 100], ["FORECASTED", 100]]

    content {
      notification_type         = notification.value[0]
      threshold                 = notification.value[1]
      threshold_type            = "PERCENTAGE"
      comparison_operator       = "GREATER_THAN"
      subscriber_sns_topic_arns = [aws_sns_topic.this.arn]
    }
  }
}
