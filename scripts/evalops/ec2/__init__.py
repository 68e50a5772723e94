"""Workers as EC2 instances: launched for one fleet, replaced when lost, ended when it ends.

`capacity` asks EC2 for instances, `pool` is the controller's view of them, `prices` says what they cost, `reap` ends what nobody
owns any more. Terraform owns the launch template; nothing here creates any other resource.
"""
