"""The worker AMI and the worker image: what they are made from, how they are built, which ones exist and may go.

Called by `evalops.commands.cloud`. Nothing here launches workers.
"""
