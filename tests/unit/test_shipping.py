"""What a run takes with it: secrets by name, versions, and nothing that a user typed with a secret in it."""

from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from evalops import locks, shipping, ui
from evalops.shipping import Wishes
from evalworker import aws, credentials, redact
from evalworker.contract.documents import JobSpec, Manifest
from evalworker.contract.wire import now
from evalworker.storage import LocalStorage

FLEET = "2026-11-29-14-05-33-1a2b3c4d"
MARKER = "marker-0123456789"


@pytest.fixture(autouse=True)
def own_redactor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test hides is shown in the next."""
    monkeypatch.setattr(redact, "_process", redact.Redactor())
    for name in redact.PROVIDER_SECRETS:
        monkeypatch.delenv(name, raising=False)


def manifest(**fields: object) -> Manifest:
    base = {"fleet_id": FLEET, "created": now(), "backend": "local", "jobs": [], "arguments": {}, "models": []}
    return Manifest.model_validate(base | {"submit_dir": "."} | fields)


def message(call: object) -> str:
    with pytest.raises(ui.Failure) as failure:
        call()  # type: ignore[operator]
    return str(failure.value.message)


def test_names_of_secrets_are_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", MARKER)
    monkeypatch.setenv("ODDLY_NAMED", "odd-0123456789")
    assert shipping.secrets(Wishes(secrets=("ODDLY_NAMED",)), "local", "x") == ["HF_TOKEN", "ODDLY_NAMED"]
    assert redact.text("odd-0123456789") == "[redacted ODDLY_NAMED]"


def test_a_secret_that_is_missing_is_a_sentence() -> None:
    assert "--secret NOT_THERE" in message(lambda: shipping.secrets(Wishes(secrets=("NOT_THERE",)), "local", "x"))


def test_a_value_in_place_of_a_name_is_refused_and_not_repeated() -> None:
    said = message(lambda: shipping.secrets(Wishes(secrets=(f"MY_TOKEN={MARKER}",)), "local", "x"))
    assert MARKER not in said


def test_secrets_on_aws_are_ssm_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("INSPECT_FLEET_NAME", "team")
    with mock_aws():
        aws.forget_clients()
        ssm = boto3.client("ssm")
        for name in ("OPENAI_API_KEY", "MY_OWN"):
            ssm.put_parameter(Name=f"/inspect-fleet/team/secrets/{name}", Value=f"{name}-{MARKER}", Type="SecureString")
        found = shipping.secrets(Wishes(secrets=("MY_OWN",)), "ec2", "team")
        assert found == ["MY_OWN", "OPENAI_API_KEY"]
        values = credentials.of_run(manifest(backend="ec2", secrets=found))
        assert values == {name: f"{name}-{MARKER}" for name in found}
        said = message(lambda: shipping.secrets(Wishes(secrets=("GONE",)), "ec2", "team"))
        assert "/inspect-fleet/team/secrets/GONE" in said
    aws.forget_clients()


@pytest.mark.parametrize(
    "fields",
    [
        {"arguments": {"model_args": {"base": f"x{MARKER}"}}},
        {"models": [{"$type": "Model", "args": {"key": MARKER}}]},
        {"environment": {"HARMLESS": MARKER}},
        {"requirements": [f"a @ git+https://example.org/{MARKER}"]},
        {"jobs": [JobSpec(job_id="0" * 16, task="t", name="t", model="m", samples=1, task_args={MARKER: 1})]},
    ],
)
def test_an_option_with_the_value_of_a_secret_is_refused(fields: dict[str, object]) -> None:
    redact.learn({"MY_TOKEN": MARKER})
    said = message(lambda: shipping.check_no_secret(manifest(**fields)))
    assert "MY_TOKEN" in said
    assert MARKER not in said
    shipping.check_no_secret(manifest())


def test_a_package_with_a_credential_in_its_url_is_refused(tmp_path: Path) -> None:
    wishes = Wishes(packages=("a @ git+https://user:word@example.org/a",))
    assert "credential" in message(lambda: shipping.prepare(wishes, "local", "x", tmp_path))
    shipping.prepare(Wishes(packages=("a @ git+ssh://git@example.org/a",)), "local", "x", tmp_path)


def test_a_resume_under_another_inspect_is_refused_unless_forced() -> None:
    here = locks.installed("inspect-ai")
    shipping.check_versions(manifest(versions={"inspect-ai": here}), force=False)
    shipping.check_versions(manifest(), force=False)
    said = message(lambda: shipping.check_versions(manifest(versions={"inspect-ai": "0.3.1"}), force=False))
    assert "0.3.1" in said
    assert str(here) in said
    shipping.check_versions(manifest(versions={"inspect-ai": "0.3.1"}), force=True)


def test_code_is_used_in_place_unless_it_must_travel(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("")
    storage = LocalStorage(tmp_path / "store")
    luggage = shipping.prepare(Wishes(), "local", "x", tmp_path)
    fields = shipping.ship(Wishes(), luggage, "local", storage)
    assert (fields["code"], fields["worker"], fields["code_root"]) == (None, None, str(tmp_path))
    assert not list(storage.list(""))
    fields = shipping.ship(Wishes(ship_code=True), luggage, "local", storage)
    assert sorted(info.key.split("/")[0] for info in storage.list("")) == ["code", "worker"]
    assert fields["requirements"] == []
    assert set(fields["versions"]) >= {"python", "inspect-ai", "inspect-fleet", "environment"}
    assert Manifest.model_validate(manifest().model_dump(by_alias=True) | fields).code == fields["code"]


def test_a_resume_by_its_id_alone_says_when_the_packed_code_is_another_by_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, folder = tmp_path / "tree" / "task.py", tmp_path / "tree"
    folder.mkdir()
    task.write_text("bug")
    luggage = shipping.prepare(Wishes(), "local", "x", folder)
    packed = manifest(**shipping.ship(Wishes(ship_code=True), luggage, "local", LocalStorage(tmp_path / "store")))
    (folder / "logs").mkdir()
    (folder / "logs" / "events").write_text("what a run leaves is no code")
    assert shipping.same_code(luggage, packed) == {"secrets": []}
    assert capsys.readouterr().err == ""
    task.write_text("mended")
    for other in ({"code": None}, {"code_root": "/elsewhere"}):  # used in place; of another tree nothing can be said
        shipping.same_code(luggage, packed.model_copy(update=other))
    assert capsys.readouterr().err == ""
    said = f"the run {FLEET} goes on with the code of its start: repeat the whole command with --run-id to ship what has changed"
    shipping.same_code(luggage, packed)
    assert capsys.readouterr().err.strip() == said
    (folder / "id_rsa").write_text("")
    shipping.same_code(luggage, packed)
    assert capsys.readouterr().err.strip() == said, "what could not be shipped is no reason to refuse"
