"""`ies infra …` and `ies secrets …` as a user types them, on a fake `terraform` and, for the bucket, on a directory."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_terraform import Fake, configuration, diagnostic, fake_terraform, lines
from test_infra_guard import FLEET, change, estate

from evalops.commands import infra as commands
from evalops.infra import doctor
from evalops.infra.doctor import Check
from evalops.infra.estate import REMOVAL, sync_lanes
from evalworker.contract import layout
from evalworker.contract.documents import Lane
from evalworker.contract.wire import now
from evalworker.storage import Storage, open_storage

__all__ = ["configuration", "fake_terraform"]  # fixtures
GONE = 'module.lane["lane-02"].aws_sqs_queue.jobs'


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """The bucket, as a directory."""
    found = open_storage(str(tmp_path / "bucket"))
    sync_lanes(found, estate().lane_records())
    monkeypatch.setattr(commands, "open_storage", lambda url: found)
    return found


def plan(*changes: dict[str, Any]) -> str:
    prior = {"values": {"outputs": {"bucket": {"value": "logs"}}}}
    return json.dumps({"resource_changes": list(changes), "prior_state": prior})


def outputs(lanes: int = 2) -> str:
    return json.dumps({name: {"value": value, "sensitive": False} for name, value in estate(lanes).to_dict().items()})


def ies(*argv: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(commands.infra, list(argv), input=stdin)


def commands_of(fake: Fake) -> list[str]:
    return [call["argv"][0] for call in fake.calls]


def test_apply_applies_the_planned_file_and_records_lanes(fake: Fake, directory: Path, store: Storage) -> None:
    fake.answer(
        {"plan": {"code": 2}, "show": {"out": plan(change("aws_vpc.this[0]", "create"))}, "output": {"out": outputs(3)}}
    )
    done = ies("apply", "--yes", "--dir", str(directory))
    assert done.exit_code == 0, done.output
    assert "recorded lane-03" in done.stderr
    assert done.stdout == "estate default in us-east-1: bucket logs, 3 lanes\n"
    assert commands_of(fake) == ["version", "plan", "show", "apply", "output"]
    planned = next(part for part in fake.calls[1]["argv"] if part.startswith("-out=")).removeprefix("-out=")
    assert fake.calls[3]["argv"][-1] == planned
    assert not Path(planned).parent.exists()


def test_progress_is_shown_on_stderr(fake: Fake, directory: Path, store: Storage) -> None:
    planned = {"type": "planned_change", "change": {"resource": {"addr": "aws_vpc.this[0]"}, "action": "create"}}
    made = {
        "type": "apply_complete",
        "hook": {"resource": {"addr": "aws_vpc.this[0]"}, "action": "create", "elapsed_seconds": 2},
    }
    show, output = {"out": plan(change("aws_vpc.this[0]", "create"))}, {"out": outputs()}
    fake.answer(
        {"plan": {"out": lines(planned), "code": 2}, "show": show, "apply": {"out": lines(made)}, "output": output}
    )
    done = ies("apply", "--yes", "--dir", str(directory))
    assert done.stderr.splitlines() == ["will make aws_vpc.this[0]", "made aws_vpc.this[0] (2 s)"]


def test_apply_without_terminal_and_without_yes_changes_nothing(fake: Fake, directory: Path, store: Storage) -> None:
    fake.answer({"plan": {"code": 2}, "show": {"out": plan()}})
    done = ies("apply", "--dir", str(directory), stdin="")
    assert (done.exit_code, commands_of(fake)) == (2, ["version", "plan", "show"])
    assert "nobody can be asked without a terminal" in done.stderr


def test_apply_with_nothing_to_change_does_not_ask(fake: Fake, directory: Path, store: Storage) -> None:
    fake.answer({"show": {"out": plan()}, "output": {"out": outputs()}})
    assert ies("apply", "--dir", str(directory)).exit_code == 0
    assert "apply" not in commands_of(fake)


def test_apply_refuses_a_plan_that_removes_the_bucket(fake: Fake, directory: Path, store: Storage) -> None:
    gone = change("aws_s3_bucket.this[0]", "delete", "create", before={"bucket": "logs"})
    fake.answer({"plan": {"code": 2}, "show": {"out": plan(gone)}})
    done = ies("apply", "--yes", "--dir", str(directory))
    assert done.exit_code == 2 and "would remove the bucket" in done.stderr


def hold(store: Storage, name: str) -> None:
    lane = Lane.from_json(store.get(layout.lane(name)).body)
    held = lane.model_copy(update={"fleet_id": FLEET, "owner": "ada", "until": now() + timedelta(hours=1)})
    store.put(layout.lane(name), held.to_bytes())


def test_apply_stops_before_an_owned_lane_unless_forced(fake: Fake, directory: Path, store: Storage) -> None:
    hold(store, "lane-02")
    fake.answer({"plan": {"code": 2}, "show": {"out": plan(change(GONE, "delete"))}, "output": {"out": outputs(1)}})
    done = ies("apply", "--yes", "--dir", str(directory))
    assert done.exit_code == 2 and "apply" not in commands_of(fake)
    assert f"lane-02 is owned by {FLEET} of ada" in done.stderr
    assert ies("apply", "--yes", "--force", "--dir", str(directory)).exit_code == 0
    assert "apply" in commands_of(fake)


def test_a_failed_apply_gives_the_fenced_lane_back(fake: Fake, directory: Path, store: Storage) -> None:
    failed = {"out": lines(diagnostic("No", "It failed.")), "code": 1}
    fake.answer({"plan": {"code": 2}, "show": {"out": plan(change(GONE, "delete"))}, "apply": failed})
    done = ies("apply", "--yes", "--dir", str(directory))
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, "Error: No: It failed")
    assert Lane.from_json(store.get(layout.lane("lane-02")).body).fleet_id is None


def test_a_lane_is_fenced_while_it_is_removed(
    fake: Fake, directory: Path, store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def apply(self: object, file: Path) -> None:
        seen.append(Lane.from_json(store.get(layout.lane("lane-02")).body).fleet_id)

    monkeypatch.setattr(commands.Terraform, "apply", apply)
    fake.answer({"plan": {"code": 2}, "show": {"out": plan(change(GONE, "delete"))}, "output": {"out": outputs(1)}})
    assert ies("apply", "--yes", "--dir", str(directory)).exit_code == 0
    assert seen == [REMOVAL]
    assert not store.exists(layout.lane("lane-02"))


def test_destroy_refuses_while_logs_remain(fake: Fake, directory: Path, store: Storage) -> None:
    store.put(f"{FLEET}/manifest.json", b"{}")
    gone = change("aws_s3_bucket.this[0]", "delete", before={"bucket": "logs"})
    fake.answer({"plan": {"code": 2}, "show": {"out": plan(gone)}})
    done = ies("destroy", "--yes", "--dir", str(directory))
    assert done.exit_code == 2 and "apply" not in commands_of(fake)
    assert f"s3://logs still holds logs ({FLEET}/, …)" in done.stderr


def test_destroy_that_would_fail_at_the_registry_touches_nothing(
    fake: Fake, directory: Path, store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands.guard, "empty_bucket", lambda *_: pytest.fail("the logs are deleted"))
    gone = change("aws_s3_bucket.this[0]", "delete", before={"bucket": "logs"})
    registry = change("aws_ecr_repository.worker", "delete", before={"name": "worker-images", "force_delete": False})
    fake.answer({"plan": {"code": 2}, "show": {"out": plan(gone, registry)}})
    done = ies("destroy", "--yes", "--force", "--dir", str(directory))
    assert done.exit_code == 2 and "apply" not in commands_of(fake)
    assert "registry worker-images with its images: `make apply` once" in done.stderr


def test_destroy_refuses_while_a_lane_is_owned_and_leaves_another_bucket_alone(
    fake: Fake, directory: Path, store: Storage
) -> None:
    hold(store, "lane-02")
    fake.answer({"plan": {"code": 2}, "show": {"out": plan(change(GONE, "delete"))}})
    assert ies("destroy", "--yes", "--dir", str(directory)).exit_code == 2
    assert ies("destroy", "--yes", "--force", "--dir", str(directory)).exit_code == 0
    assert store.exists(layout.lane("lane-01"))


def test_plan_in_json_has_no_values(fake: Fake, directory: Path) -> None:
    secret = change("aws_x.y", "update", before={"password": "sk-secret"})
    fake.answer(
        {"plan": {"code": 2}, "show": {"out": plan(secret, change("aws_x.z", "no-op"), change(GONE, "delete"))}}
    )
    done = ies("plan", "--json", "--dir", str(directory))
    assert done.exit_code == 0 and "sk-secret" not in done.output
    assert json.loads(done.stdout) == {
        "changes": True,
        "resources": [{"address": "aws_x.y", "actions": ["update"]}, {"address": GONE, "actions": ["delete"]}],
        "lanes_removed": ["lane-02"],
    }


def test_plan_can_be_kept(fake: Fake, directory: Path, tmp_path: Path) -> None:
    fake.answer({"show": {"out": plan()}})
    done = ies("plan", "--out", str(tmp_path / "kept"), "--dir", str(directory))
    assert (done.exit_code, done.stdout) == (0, "nothing to change\n")
    assert f"-out={tmp_path / 'kept'}" in fake.calls[1]["argv"]


def test_outputs_without_an_estate(fake: Fake, directory: Path) -> None:
    fake.answer({"output": {"out": "{}"}})
    done = ies("outputs", "--dir", str(directory))
    assert done.exit_code == 2 and "there is no estate in this state" in done.stderr


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("skip", 0), ("fail", 1)])
def test_doctor_exit_code(monkeypatch: pytest.MonkeyPatch, state: Any, code: int) -> None:
    monkeypatch.setattr(doctor, "examine", lambda settings: [Check("lanes", state, "none")])
    assert ies("doctor").exit_code == code
    done = ies("doctor", "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout) == {"checks": [{"name": "lanes", "state": state, "text": "none"}]}
