"""Workers as EC2 instances: launched for one fleet, replaced when lost, ended when it ends.

`capacity` asks EC2 for instances, `pool` is the controller's view of them, `prices` says what they cost, `reap_rules` says what nobody
owns any more and `reaper` ends it. Terraform owns the launch template; nothing here creates any other resource.
"""
