variable "name" {
  type        = string
  description = "The queues' common name; -jobs, -events and -dead follow it."
}

variable "arn" {
  type        = string
  description = "The queues' common ARN, up to the same point."
}

variable "account" {
  type        = string
  description = "The only account whose principals may use the queues."
}

variable "topic_arn" {
  type        = string
  description = "SNS topic of the alarms."
}
