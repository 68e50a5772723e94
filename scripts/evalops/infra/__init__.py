"""The estate that Terraform owns, as the scripts see it: `terraform` runs it, `estate` reads the names that it made, `guard`
stops what would hurt a running fleet, `doctor` says what is missing, `secrets` carries provider keys to their parameters.
"""
