"""What runs where the evaluations run: on an EC2 instance, in a Batch container, or as a process of this machine.

The agent (boto3 only) takes jobs from a lane's queue, a fork server holds Inspect and the run's code in memory, and each
job is one `inspect_ai.eval_set` in a process of its own. Nothing here imports `evalops`, click or jinja2.
"""

__version__ = "0.1.0"
