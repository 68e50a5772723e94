#!/bin/sh
# Prints the path of a Terraform CLI configuration for machines that hold the AWS provider as an unpacked mirror, and nothing
# on all others, where the registry serves it. TERRAFORM_MIRROR names the mirror; else the usual folders are looked through.
set -eu
lock="$(dirname "$0")/../../terraform/.terraform.lock.hcl"
unpacked=$(sed -n 's|^provider "\(.*/hashicorp/aws\)".*|\1|p' "$lock") # <host>/<namespace>/<type>, as a mirror has its folders
for mirror in "${TERRAFORM_MIRROR:-}" "$HOME/.terraform.d/plugins" /usr/share/terraform/plugins /usr/local/share/terraform/plugins /opt/*; do
  if [ -z "$mirror" ] || [ ! -d "$mirror/$unpacked" ]; then continue; fi
  config="${TMPDIR:-/tmp}/inspect-fleet-terraform-$(id -u).tfrc"
  printf 'provider_installation {\n  filesystem_mirror {\n    path    = "%s"\n    include = ["%s/*"]\n  }\n}\n' "$mirror" "${unpacked%/*}" >"$config.$$"
  mv -f "$config.$$" "$config"
  printf '%s\n' "$config"
  exit 0
done
