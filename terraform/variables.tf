variable "name" {
  type        = string
  description = "Name of this estate, part of every resource's name and of the SSM path. Two estates in one account need two names. Free."
  default     = "default"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,19}$", var.name)) && !endswith(var.name, "-")
    error_message = "name must be 1 to 20 lower-case letters, digits and hyphens, begin with a letter and not end with a hyphen."
  }
}

variable "region" {
  type        = string
  description = "Region of everything. Null: what the environment or the profile says. Free."
  default     = null
}

variable "tags" {
  type        = map(string)
  description = "Further tags on everything, for instance a cost centre. The keys also appear in the instance metadata, which allows fewer characters than tags do. Free."
  default     = {}

  validation {
    condition     = alltrue([for key in keys(var.tags) : can(regex("^[A-Za-z0-9+=.,_:@-]{1,128}$", key)) && !contains([".", "..", "_index"], key)])
    error_message = "tags: a key may hold letters, digits and + - = . , _ : @ only (no space, no slash), because instances read their tags from the metadata service."
  }

  validation {
    condition     = alltrue([for value in values(var.tags) : length(value) <= 256])
    error_message = "tags: a value may have 256 characters at most."
  }

  validation {
    condition     = length(setintersection(keys(var.tags), ["inspect-fleet", "managed-by", "Name", "fleet-id", "lane", "owner", "fleet-deadline", "worker-wheel", "inspect-fleet-bucket"])) == 0
    error_message = "tags: inspect-fleet, inspect-fleet-bucket, managed-by, Name, fleet-id, lane, owner, fleet-deadline and worker-wheel are set by Inspect Fleet itself."
  }
}

# Network

variable "vpc_id" {
  type        = string
  description = "An existing VPC to use instead of a new one. Its subnets and its way to the internet are yours. Free."
  default     = null

  validation {
    condition     = var.vpc_id == null || can(regex("^vpc-[0-9a-f]+$", var.vpc_id))
    error_message = "vpc_id must look like vpc-0123456789abcdef0."
  }
}

variable "subnet_ids" {
  type        = list(string)
  description = "Subnets of the existing VPC in which workers start. More zones find more spot capacity. Free."
  default     = []

  validation {
    condition     = (var.vpc_id == null) == (length(var.subnet_ids) == 0)
    error_message = "subnet_ids and vpc_id go together: give both for an existing VPC, or neither for a new one."
  }

  validation {
    condition     = length(var.subnet_ids) <= 6
    error_message = "subnet_ids: 6 at most, one per zone, because the researcher's policy names each."
  }
}

variable "vpc_cidr" {
  type        = string
  description = "Addresses of the new VPC. Must not overlap with networks that you connect it to, nor with Docker's own (172.17.0.0/16 and up). Free."
  default     = "10.83.0.0/16"

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16 && tonumber(split("/", var.vpc_cidr)[1]) <= 22, false)
    error_message = "vpc_cidr must be an IPv4 network between /16 and /22, such as 10.83.0.0/16."
  }
}

variable "availability_zones" {
  type        = number
  description = "Zones of the new VPC. More zones find more spot capacity. Free, but private endpoints are paid per zone."
  default     = 3

  validation {
    condition     = var.availability_zones >= 1 && var.availability_zones <= 4 && floor(var.availability_zones) == var.availability_zones
    error_message = "availability_zones must be a whole number from 1 to 4."
  }
}

variable "private_network" {
  type        = bool
  description = "Subnets without any way to the internet, AWS services through endpoints. Each interface endpoint costs about 7 USD a month per zone, idle or not. Only models behind an endpoint of yours can be reached."
  default     = false
}

variable "egress_ports" {
  type        = list(number)
  description = "TCP ports that workers may connect to. Add the port of a model server of yours. Nothing may connect to a worker. Free."
  default     = [80, 443]

  validation {
    condition     = length(var.egress_ports) > 0 && alltrue([for port in var.egress_ports : port >= 1 && port <= 65535])
    error_message = "egress_ports must be TCP ports from 1 to 65535, and not empty."
  }
}

# Storage

variable "bucket_name" {
  type        = string
  description = "Name of the bucket. Null: made from name, account and region. An empty bucket is free."
  default     = null

  validation {
    condition     = var.bucket_name == null || can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name must be 3 to 63 lower-case letters, digits, dots and hyphens."
  }
}

variable "use_existing_bucket" {
  type        = bool
  description = "True: bucket_name exists and stays as it is; its encryption, policy and lifecycle are yours. Free."
  default     = false

  validation {
    condition     = !var.use_existing_bucket || var.bucket_name != null
    error_message = "use_existing_bucket needs bucket_name."
  }
}

variable "kms_key_arn" {
  type        = string
  description = "A KMS key for the bucket and the disks of workers and Batch hosts; its own policy must name two roles of AWS, see docs/aws.md. Null: SSE-S3 and the free EBS key. A key of yours costs 1 USD a month and a little per request."
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/", var.kms_key_arn))
    error_message = "kms_key_arn must be the ARN of a key, arn:aws:kms:REGION:ACCOUNT:key/ID."
  }
}

variable "empty_bucket_on_destroy" {
  type        = bool
  description = "True: destroy deletes every log in the bucket. False: destroy fails while the bucket holds anything. Free."
  default     = false
}

variable "retention_days" {
  type = object({
    partial    = optional(number, 14)
    working    = optional(number, 365)
    noncurrent = optional(number, 30)
    logs       = optional(number, 365)
  })
  description = "Days after which things go: partial/ (unfinished logs), working (logs/working/ and the runs' own prefixes; promoted logs stay for ever), noncurrent (replaced or deleted versions), logs (CloudWatch). Storage costs about 0.02 USD per GB and month."
  default     = {}

  validation {
    condition     = alltrue([for days in [var.retention_days.partial, var.retention_days.working, var.retention_days.noncurrent] : days >= 1 && floor(days) == days])
    error_message = "retention_days: partial, working and noncurrent must be whole numbers of days, at least 1."
  }

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.retention_days.logs)
    error_message = "retention_days.logs must be one of CloudWatch's values: 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, …"
  }
}

# Queues

variable "lanes" {
  type        = number
  description = "How many fleets can run at once; each lane is three queues. Idle queues are free; above four lanes, two alarms of 0.10 USD a month come with each."
  default     = 4

  validation {
    condition     = var.lanes >= 1 && var.lanes <= 16 && floor(var.lanes) == var.lanes
    error_message = "lanes must be a whole number from 1 to 16: each running fleet needs one."
  }
}

# Workers

variable "instance_types" {
  type        = list(string)
  description = "Instance types of workers and of Batch hosts, the preferred first; the architecture (x86_64, arm64) follows from the type. Paid per second while they run."
  default     = ["m7i.large", "m7a.large", "m6i.large", "m6a.large", "m5.large", "r6i.large"]

  validation {
    condition     = length(var.instance_types) > 0 && alltrue([for type in var.instance_types : can(regex("^[a-z][a-z0-9-]*[0-9][a-z0-9-]*[.][a-z0-9-]+$", type))])
    error_message = "instance_types must name at least one type, and each must look like m7i.large."
  }
}

variable "root_volume" {
  type = object({
    gb                         = optional(number, 60)
    initialization_rate_mib_ps = optional(number)
  })
  description = "A worker's disk: size in GB, and how fast the image's blocks are loaded (100 to 300 MiB/s; paid per GB of the snapshot at each launch). A running 60 GB disk costs 0.007 USD an hour."
  default     = {}

  validation {
    condition     = var.root_volume.gb >= 20 && var.root_volume.gb <= 16384 && floor(var.root_volume.gb) == var.root_volume.gb
    error_message = "root_volume.gb must be a whole number from 20, which is what a baked image has, to 16384."
  }

  validation {
    condition     = var.root_volume.initialization_rate_mib_ps == null ? true : var.root_volume.initialization_rate_mib_ps >= 100 && var.root_volume.initialization_rate_mib_ps <= 300
    error_message = "root_volume.initialization_rate_mib_ps must be from 100 to 300, or left out."
  }
}

variable "max_lifetime_minutes" {
  type        = number
  description = "A worker powers off (and so terminates) after so many minutes, whatever happens: the most that a forgotten machine can cost. A longer --deadline is refused."
  default     = 1440

  validation {
    condition     = var.max_lifetime_minutes >= 10 && var.max_lifetime_minutes <= 10080 && floor(var.max_lifetime_minutes) == var.max_lifetime_minutes
    error_message = "max_lifetime_minutes must be a whole number from 10 to 10080 (a week)."
  }
}

variable "ssm_access" {
  type        = bool
  description = "Allow sessions on workers through Systems Manager (ct fleet ssh). No port is opened. Free."
  default     = false
}

# Batch

variable "batch" {
  type = object({
    enabled           = optional(bool, true)
    max_vcpus         = optional(number, 64)
    vcpus             = optional(number, 2)
    memory_mib        = optional(number, 6144)
    timeout_minutes   = optional(number, 720)
    runnable_minutes  = optional(number, 60)
    image_digest      = optional(string)
    image_elsewhere   = optional(string)
    host_retries      = optional(number, 3)
    root_volume_gb    = optional(number, 60)
    spot_bid_percents = optional(number, 100)
  })
  description = "AWS Batch: the most vCPUs at once per compute environment; vCPUs, memory and minutes of a job unless the submission says otherwise; minutes in RUNNABLE before a job that cannot start is cancelled; attempts when a host is lost; the worker image by digest in this estate's registry (or a complete reference elsewhere). Paid per second while jobs run."
  default     = {}

  validation {
    condition     = var.batch.image_digest == null || can(regex("^sha256:[0-9a-f]{64}$", var.batch.image_digest))
    error_message = "batch.image_digest must be sha256: and 64 hex digits, as `make push-image` prints it."
  }

  validation {
    condition     = var.batch.max_vcpus >= var.batch.vcpus && var.batch.vcpus >= 1
    error_message = "batch.max_vcpus must be at least batch.vcpus, or no job could ever start."
  }

  validation {
    condition     = var.batch.runnable_minutes >= 10 && var.batch.runnable_minutes <= 1440
    error_message = "batch.runnable_minutes must be from 10 to 1440."
  }

  validation {
    condition     = var.batch.host_retries >= 1 && var.batch.host_retries <= 10
    error_message = "batch.host_retries must be from 1 to 10 attempts."
  }

  validation {
    condition     = var.batch.root_volume_gb >= 30 && var.batch.root_volume_gb <= 16384 && floor(var.batch.root_volume_gb) == var.batch.root_volume_gb
    error_message = "batch.root_volume_gb must be a whole number from 30, which is what Batch's own image has, to 16384."
  }
}

# Secrets

variable "secret_names" {
  type        = set(string)
  description = "Provider keys, named as the environment variables that the providers read. Values come from `ies secrets push`. Free."
  default     = ["ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GROQ_API_KEY", "HF_TOKEN", "MISTRAL_API_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY"]

  validation {
    condition     = alltrue([for name in var.secret_names : can(regex("^[A-Z][A-Z0-9_]*$", name))])
    error_message = "secret_names must be names of environment variables: capital letters, digits and underscores."
  }

  validation {
    condition     = length(var.secret_names) <= 50
    error_message = "secret_names: 50 at most, which is what one listing of parameters can name."
  }
}

# Observability

variable "alarm_email" {
  type        = string
  description = "An address that gets alarms and a message when a fleet ends or stalls; it must confirm once. Free for the first thousand a month."
  default     = null

  validation {
    condition     = var.alarm_email == null || can(regex("^[^@[:space:]]+@[^@[:space:]]+$", var.alarm_email))
    error_message = "alarm_email must be an e-mail address."
  }
}

variable "monthly_budget_usd" {
  type        = number
  description = "With an amount, a budget on this estate's tag that warns at 80% and 100%, and at a forecast of 100%. Null: none. Free."
  default     = null

  validation {
    condition     = var.monthly_budget_usd == null ? true : var.monthly_budget_usd > 0
    error_message = "monthly_budget_usd must be above 0, or left out."
  }
}
