"""`python -m evalworker`: start this machine's agent. The arguments say which fleet, or `--imds` lets the instance's tags say it.

Secrets never stand among the arguments.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from evalworker import boot, imds, redact
from evalworker.agent import Agent
from evalworker.aws import ServiceError
from evalworker.code import CodeError
from evalworker.contract.ids import check_run_id
from evalworker.contract.wire import Unreadable
from evalworker.storage import open_storage
from evalworker.worker import Config, Log

START_S = 60.0
"""How long a start is tried."""

PAUSE_S = (1.0, 3.0)
"""Between two tries."""


def main(argv: list[str] | None = None) -> int:
    """Run an agent until it ends itself; 1 with one sentence on stderr when it cannot start."""
    parser = _parser()
    options = parser.parse_args(argv)
    missing = [name for name in ("root", "fleet", "lane", "instance") if getattr(options, name) is None]
    if missing and not options.imds:
        parser.error(f"without --imds these are needed: {', '.join('--' + name for name in missing)}")
    try:
        config = imds.config(imds.Imds(), options.work.resolve()) if options.imds else _config(options)
    except imds.ImdsError as error:
        print(f"the worker cannot start: {error}", file=sys.stderr)  # noqa: T201
        return 1
    redact.learn_environment()
    try:
        config.work.mkdir(parents=True, exist_ok=True)
        log = Log(config.work / "worker.log")
        _begin(config, argv or sys.argv[1:], log).run()
    except (ServiceError, Unreadable, boot.BootError, CodeError) as error:
        sentence = redact.text(f"the worker {config.instance_id} cannot start: {error}")
        print(sentence, file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _begin(config: Config, argv: list[str], log: Log) -> Agent:
    """The agent, ready to run. What AWS cannot serve just now is tried again: a machine that ends for it would have to be replaced."""
    end = time.monotonic() + START_S
    while True:
        try:
            boot.settle(open_storage(config.root), config.fleet_id, config.work, argv, log.line)
            return Agent(config)
        except ServiceError as error:
            if not error.retryable or time.monotonic() > end:
                raise
            log.line(f"starting: {error}; trying again")
            time.sleep(random.uniform(*PAUSE_S))  # noqa: S311 - machines that boot together shall not ask together


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evalworker", description="Run one worker of a fleet.")
    parser.add_argument("--imds", action="store_true", help="an EC2 instance: its metadata and tags say all but --work")
    parser.add_argument("--root", help="s3://bucket or a directory")
    parser.add_argument("--fleet", type=check_run_id, help="the fleet's id")
    parser.add_argument("--lane", help="the lane that feeds it")
    parser.add_argument("--instance", help="this worker's name")
    parser.add_argument("--instance-type", default="local")
    parser.add_argument("--lifecycle", default="local", choices=["local", "spot", "on-demand", "batch"])
    parser.add_argument(
        "--launched", type=float, default=time.time(), help="when it was launched, seconds since the epoch"
    )
    parser.add_argument("--work", required=True, type=Path, help="a directory of its own")
    parser.add_argument("--slots", type=int, default=None, help="jobs at once")
    return parser


def _config(options: argparse.Namespace) -> Config:
    return Config(
        root=options.root,
        fleet_id=options.fleet,
        lane=options.lane,
        instance_id=options.instance,
        instance_type=options.instance_type,
        lifecycle=options.lifecycle,
        launched=options.launched,
        work=options.work.resolve(),
        slots=options.slots,
    )


if __name__ == "__main__":
    sys.exit(main())
