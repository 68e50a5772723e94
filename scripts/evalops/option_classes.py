"""What each option of `inspect eval-set` means for a fleet: it changes results, it does not, or it cannot be honoured.

Pure data, by Click's parameter names; `evalops.inspect_options` acts on it. A test fails when Inspect gains an option that is not
here, so that somebody decides whether it belongs into a job's identity.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """Changes what a sample's result is: part of a job's identity."""


@dataclass(frozen=True)
class Run:
    """Changes how a run goes (speed, retries, logging, labels) and not what its results are."""


@dataclass(frozen=True)
class Own:
    """Our commands define an option of this name and meaning themselves."""


@dataclass(frozen=True)
class Refused:
    """Cannot be honoured, and `reason` says why as the second half of a sentence.

    Attributes:
        reason: one sentence for the user.
        allowed: values that can be honoured all the same.
        in_process: whether it can be honoured where one `eval_set` runs in this process (`ies run local`).
    """

    reason: str
    allowed: frozenset[object] = frozenset()
    in_process: bool = False


OptionClass = Result | Run | Own | Refused

_SCANNER = Refused(
    "scanners read the logs of a whole run: run Inspect Scout on the run's logs instead", in_process=True
)
_NOBODY_THERE = Refused(
    "a worker has nobody to answer: use an approval policy that decides without a human", in_process=True
)
_DEBUGGER = Refused("a worker has no debugger: use `ies run local` or `inspect eval` to debug a task", in_process=True)
_ROOT = "logs are kept under the run's root (S3_BUCKET_NAME, or the current directory)"
_BUNDLE = Refused(
    "a run's logs are bundled when it has ended: `inspect view bundle` on its log directory", in_process=True
)

CLASSES: dict[str, OptionClass] = {
    "tasks": Result(),
    "json_output": Own(),
    "detach": Own(),
    # eval-set's own
    "retry_attempts": Run(),
    "retry_immediate": Run(),
    "retry_wait": Run(),
    "retry_connections": Run(),
    "no_retry_cleanup": Run(),
    "incomplete_action": Run(),
    "incomplete_max": Run(),
    "bundle_dir": _BUNDLE,
    "bundle_overwrite": _BUNDLE,
    "embed_viewer": _BUNDLE,
    "log_dir_allow_dirty": Refused("each job has a log directory of its own, so there is nothing to allow"),
    "eval_set_id": Refused("a run is named by --run-id"),
    # models
    "model": Result(),
    "model_base_url": Run(),
    "m": Result(),
    "model_config": Result(),
    "model_spec": Result(),
    "model_role": Result(),
    "model_cost_config": Result(),
    # tasks and solvers
    "t": Result(),
    "task_config": Result(),
    "solver": Result(),
    "s": Result(),
    "solver_config": Result(),
    "run_config": Refused("`inspect eval-set` does not support it: give its contents as options"),
    "tags": Run(),
    "metadata": Run(),
    "approval": Result(),
    "review": Result(),
    "sentinel": Result(),
    "sentinel_arg": Result(),
    "notification": _NOBODY_THERE,
    "acp_server": _NOBODY_THERE,
    "ctl_server": Refused(
        "jobs are steered by the fleet: use `ct fleet status` and `ct fleet stop`", frozenset({False}), in_process=True
    ),
    # scanners
    "scanner": _SCANNER,
    "scanner_arg": _SCANNER,
    "scans": _SCANNER,
    "scan_name": _SCANNER,
    "scan_tags": _SCANNER,
    "scan_metadata": _SCANNER,
    "scan_filter": _SCANNER,
    "scan_model": _SCANNER,
    "scan_model_base_url": _SCANNER,
    "scan_model_arg": _SCANNER,
    "scan_model_config": _SCANNER,
    "scan_model_role": _SCANNER,
    "scan_generate_config": _SCANNER,
    # sandboxes
    "sandbox": Result(),
    "no_sandbox_cleanup": Refused(
        "a worker removes the containers of a job when it ends, or the next jobs would lack the space", in_process=True
    ),
    "sandbox_prebuilt": Run(),
    "max_sandboxes": Run(),
    "max_subprocesses": Run(),
    "checkpoint": Run(),
    # which samples, how often, how far
    "limit": Result(),
    "sample_id": Result(),
    "sample_shuffle": Result(),
    "epochs": Result(),
    "epochs_reducer": Result(),
    "no_epochs_reducer": Result(),
    "message_limit": Result(),
    "token_limit": Result(),
    "turn_limit": Result(),
    "cost_limit": Result(),
    "time_limit": Result(),
    "working_limit": Result(),
    "no_score": Result(),
    "no_score_display": Run(),
    "score_on_error": Result(),
    # how errors are handled: a job that completed did so under either setting
    "fail_on_error": Run(),
    "no_fail_on_error": Run(),
    "continue_on_fail": Run(),
    "retry_on_error": Run(),
    "debug_errors": _DEBUGGER,
    # speed
    "max_samples": Run(),
    "max_dataset_memory": Run(),
    "max_tasks": Refused(
        "a job is one task: --slots says how many run on a worker, --max-workers how many workers", in_process=True
    ),
    # logs
    "no_log_samples": Refused("scores, counts and retries of a run are read from the samples in its logs"),
    "no_log_realtime": Run(),
    "log_images": Run(),
    "log_model_api": Run(),
    "log_refusals": Run(),
    "log_buffer": Run(),
    "log_shared": Run(),
    "log_format": Refused("everything that reads a run's logs expects .eval files", frozenset({"eval"})),
    "log_level": Run(),
    "log_level_transcript": Run(),
    "log_dir": Refused(_ROOT),
    "display": Refused(
        "a worker has no terminal: only plain, log and none can be used",
        frozenset({"plain", "log", "none"}),
        in_process=True,
    ),
    "trace": Refused("`inspect eval-set` cannot show a conversation: use `inspect eval --trace`"),
    "no_ansi": Run(),
    "traceback_locals": Run(),
    "env": Result(),
    "debug": _DEBUGGER,
    "debug_port": _DEBUGGER,
    # generate config: results, but for what Inspect itself takes for transport
    "generate_config": Result(),
    "max_retries": Run(),
    "timeout": Run(),
    "attempt_timeout": Run(),
    "stream_idle_timeout": Run(),
    "max_connections": Run(),
    "adaptive_connections": Run(),
    "cache": Run(),
    "cache_prompt": Run(),
    "batch": Run(),
    "max_tokens": Result(),
    "system_message": Result(),
    "best_of": Result(),
    "frequency_penalty": Result(),
    "presence_penalty": Result(),
    "logit_bias": Result(),
    "seed": Result(),
    "stop_seqs": Result(),
    "temperature": Result(),
    "top_p": Result(),
    "top_k": Result(),
    "num_choices": Result(),
    "logprobs": Result(),
    "top_logprobs": Result(),
    "prompt_logprobs": Result(),
    "parallel_tool_calls": Result(),
    "internal_tools": Result(),
    "max_tool_output": Result(),
    "fallback_models": Result(),
    "fail_on_refusal": Result(),
    "verbosity": Result(),
    "effort": Result(),
    "reasoning_effort": Result(),
    "reasoning_mode": Result(),
    "reasoning_tokens": Result(),
    "reasoning_summary": Result(),
    "reasoning_history": Result(),
    "response_schema": Result(),
    "extra_headers": Result(),
    "extra_body": Result(),
    "modalities": Result(),
}
"""Every parameter of Inspect's `eval-set` command, by Click's name for it."""

ARGUMENT_OF: dict[str, str] = {
    "m": "model_args",
    "model_config": "model_args",
    "model_spec": "model",
    "model_role": "model_roles",
    "t": "task_args",
    "task_config": "task_args",
    "s": "solver",
    "solver_config": "solver",
    "sentinel_arg": "sentinel",
    "epochs_reducer": "epochs",
    "no_epochs_reducer": "epochs",
    "no_score": "score",
    "no_score_display": "score_display",
    "no_fail_on_error": "fail_on_error",
    "no_log_samples": "log_samples",
    "no_log_realtime": "log_realtime",
    "no_sandbox_cleanup": "sandbox_cleanup",
    "no_retry_cleanup": "retry_cleanup",
}
"""The keyword argument of `eval_set` that a parameter sets, where it is another name."""

RESULT_ARGUMENTS = frozenset(ARGUMENT_OF.get(name, name) for name, kind in CLASSES.items() if isinstance(kind, Result))
"""The keyword arguments of `eval_set` that change results. Generate-config fields that have no option count too."""

FLEET_DEFAULTS: dict[str, object] = {
    "continue_on_fail": True,  # an errored sample ends the log as `error` after the others ran, so that a retry heals it
    "retry_cleanup": False,  # an attempt's older logs are what a partial upload and a comparison may still read
    "log_shared": 60,
    "log_format": "eval",
    "display": "none",
    "ctl_server": False,  # a job is steered by its agent; INSPECT_EVAL_CTL_SERVER=keep would never let it end
}
"""What a fleet gives to `eval_set` where the user did not say."""

IN_PROCESS_DEFAULTS: dict[str, object] = {"log_format": "eval"}
"""The same where one `eval_set` runs in this process: Inspect's own settings stay."""

LONGEST_LOG_SHARED_S = 60
"""Unfinished logs are uploaded at this interval, so that at most so much is run again; a longer one is lowered."""
