"""Docker on this machine, as Inspect's sandboxes need it: checks, images, clean-up. Called by `ies sandbox` and the AMI build."""
