"""The mark on Docker objects that a job made: they and only they are removed after it."""

from evalworker.contract.ids import check_job_id, check_run_id

JOB_LABEL = "inspect-fleet.job"
"""The label of each container, network and volume of a job's sandboxes; its value is `<run>/<job>`."""


def job_label(run_id: str, job_id: str) -> str:
    """The label with its value, as Docker's `--label` and `--filter label=` take it."""
    return f"{JOB_LABEL}={check_run_id(run_id)}/{check_job_id(job_id)}"
