# One VPC without inbound: public subnets (a public address, no open port) by default, or private ones with endpoints.

data "aws_availability_zones" "available" {
  count = local.own_vpc ? 1 : 0
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_subnet" "existing" {
  for_each = toset(var.subnet_ids)
  id       = each.value
  vpc_id   = var.vpc_id
}

locals {
  own_vpc    = var.vpc_id == null
  zones      = local.own_vpc ? slice(data.aws_availability_zones.available[0].names, 0, min(var.availability_zones, length(data.aws_availability_zones.available[0].names))) : []
  vpc_id     = local.own_vpc ? aws_vpc.this[0].id : var.vpc_id
  subnet_ids = local.own_vpc ? [for zone in local.zones : aws_subnet.worker[zone].id] : [for id in var.subnet_ids : data.aws_subnet.existing[id].id]

  interface_endpoints = !local.own_vpc || !var.private_network ? [] : concat(
    ["sqs", "logs", "ssm", "ecr.api", "ecr.dkr", "ec2", "sts"],
    var.ssm_access ? ["ssmmessages", "ec2messages"] : [],
    var.batch.enabled ? ["ecs", "ecs-agent", "ecs-telemetry"] : [],
  )
}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:Flow logs are paid by the gigabyte; no machine accepts a connection and the estate is free while idle.
  count                = local.own_vpc ? 1 : 0
  cidr_block           = var.vpc_cidr
  enable_dns_hostnames = true
  enable_dns_support   = true
  tags                 = { Name = local.prefix }
}

# The default group would allow its members to talk to each other; without rules nothing can use it.
resource "aws_default_security_group" "closed" {
  count  = local.own_vpc ? 1 : 0
  vpc_id = aws_vpc.this[0].id
}

resource "aws_internet_gateway" "this" {
  count  = local.own_vpc && !var.private_network ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  tags   = { Name = local.prefix }
}

resource "aws_subnet" "worker" {
  #checkov:skip=CKV_AWS_130:A public address is the free way out (a NAT gateway costs 32 USD a month); the security group has no inbound rule.
  for_each                = toset(local.zones)
  vpc_id                  = aws_vpc.this[0].id
  availability_zone       = each.value
  cidr_block              = cidrsubnet(var.vpc_cidr, 2, index(local.zones, each.value))
  map_public_ip_on_launch = !var.private_network
  tags                    = { Name = "${local.prefix}-${each.value}" }
}

resource "aws_route_table" "worker" {
  count  = local.own_vpc ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  tags   = { Name = local.prefix }
}

resource "aws_route" "internet" {
  count                  = local.own_vpc && !var.private_network ? 1 : 0
  route_table_id         = aws_route_table.worker[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "worker" {
  for_each       = aws_subnet.worker
  subnet_id      = each.value.id
  route_table_id = aws_route_table.worker[0].id
}

resource "aws_security_group" "worker" {
  name        = "${local.prefix}-worker"
  description = "Workers and Batch hosts: nothing in, the given TCP ports out"
  vpc_id      = local.vpc_id
  tags        = { Name = "${local.prefix}-worker" }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_egress_rule" "worker" {
  for_each          = toset([for port in var.egress_ports : tostring(port)])
  security_group_id = aws_security_group.worker.id
  description       = "Out to port ${each.value}"
  ip_protocol       = "tcp"
  from_port         = tonumber(each.value)
  to_port           = tonumber(each.value)
  cidr_ipv4         = "0.0.0.0/0"
}

# The S3 gateway endpoint is free in both kinds of subnet and saves traffic charges.
resource "aws_vpc_endpoint" "s3" {
  count             = local.own_vpc ? 1 : 0
  vpc_id            = aws_vpc.this[0].id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.worker[0].id]
  tags              = { Name = "${local.prefix}-s3" }
}

# An interface endpoint is a network card that must accept HTTPS: from workers, and from nothing else.
resource "aws_security_group" "endpoints" {
  count       = length(local.interface_endpoints) > 0 ? 1 : 0
  name        = "${local.prefix}-endpoints"
  description = "Endpoints of AWS services: HTTPS from workers only"
  vpc_id      = local.vpc_id
  tags        = { Name = "${local.prefix}-endpoints" }
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count                        = length(local.interface_endpoints) > 0 ? 1 : 0
  security_group_id            = aws_security_group.endpoints[0].id
  description                  = "HTTPS from workers"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = aws_security_group.worker.id
}

resource "aws_vpc_endpoint" "interface" {
  for_each            = toset(local.interface_endpoints)
  vpc_id              = aws_vpc.this[0].id
  service_name        = "com.amazonaws.${local.region}.${each.value}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = local.subnet_ids
  security_group_ids  = [aws_security_group.endpoints[0].id]
  tags                = { Name = "${local.prefix}-${each.value}" }
}
