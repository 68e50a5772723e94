"""The metadata client against a service of its own: tokens, waiting, refusals; and the watch for spot notices."""

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalworker import imds, notice
from evalworker.__main__ import main

FLEET = "2026-11-29-16-05-07-0123abcd"
TAGS = {"fleet-id": FLEET, "lane": "lane-01", "inspect-fleet-bucket": "logs", "inspect-fleet": "mine"}
IDENTITY = {
    "instanceId": "i-1",
    "instanceType": "m7i.large",
    "region": "eu-west-1",
    "pendingTime": "2026-11-29T16:05:07Z",
}


class Service:
    """A metadata service; `documents` by path, `token` the one that is valid, `asked` what came."""

    def __init__(self) -> None:
        self.documents = {
            "dynamic/instance-identity/document": json.dumps(IDENTITY),
            "meta-data/instance-life-cycle": "spot",
        }
        self.documents |= {f"meta-data/tags/instance/{name}": value for name, value in TAGS.items()}
        self.token = 1
        self.refusals: list[int] = []
        self.asked: list[str] = []
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
                self.answer(200, str(service.token))

            def do_GET(self) -> None:
                path = self.path.removeprefix("/latest/")
                service.asked.append(path)
                if service.refusals:
                    self.answer(service.refusals.pop(0), "")
                elif self.headers.get("X-aws-ec2-metadata-token") != str(service.token):
                    self.answer(401, "")
                else:
                    found = service.documents.get(path)
                    self.answer(404 if found is None else 200, found or "")

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for name in ("AWS_DEFAULT_REGION", "INSPECT_FLEET_NAME", "S3_BUCKET_NAME"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used
    running = Service()
    monkeypatch.setenv(imds.ENDPOINT, running.endpoint)
    yield running
    running.server.shutdown()
    running.server.server_close()


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.time = 0.0
        self.on_sleep: list[object] = []

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        if self.on_sleep:
            self.on_sleep.pop(0)()  # type: ignore[operator]


def test_the_configuration_comes_from_identity_and_tags(service: Service, tmp_path: Path) -> None:
    found = imds.config(imds.Imds(), tmp_path)
    assert (found.root, found.fleet_id, found.lane) == ("s3://logs", FLEET, "lane-01")
    assert (found.instance_id, found.instance_type, found.lifecycle, found.imds) == ("i-1", "m7i.large", "spot", True)
    assert found.launched == 1795968307.0
    assert (os.environ["AWS_DEFAULT_REGION"], os.environ["INSPECT_FLEET_NAME"]) == ("eu-west-1", "mine")


@pytest.mark.parametrize("tag", ["fleet-id", "lane", "inspect-fleet-bucket"])
def test_an_instance_of_no_fleet_is_one_sentence(service: Service, tmp_path: Path, tag: str) -> None:
    del service.documents[f"meta-data/tags/instance/{tag}"]
    with pytest.raises(imds.ImdsError, match=f"no worker of a fleet: it has no tag {tag}"):
        imds.config(imds.Imds(), tmp_path)


def test_a_fleet_id_that_is_none_and_an_identity_that_cannot_be_read(service: Service, tmp_path: Path) -> None:
    service.documents["meta-data/tags/instance/fleet-id"] = "../../x"
    with pytest.raises(imds.ImdsError, match="the tag fleet-id"):
        imds.config(imds.Imds(), tmp_path)
    service.documents["dynamic/instance-identity/document"] = "<html>"
    with pytest.raises(imds.ImdsError, match="identity document cannot be read: <html>"):
        imds.config(imds.Imds(), tmp_path)


def test_an_expired_token_is_renewed(service: Service) -> None:
    client = imds.Imds(sleep=lambda _: None)
    assert client.tag("lane") == "lane-01"
    service.token = 2
    assert client.tag("lane") == "lane-01"


def test_a_service_in_trouble_is_asked_again_and_a_missing_document_is_none(service: Service) -> None:
    service.refusals = [500, 503]
    clock = Clock()
    client = imds.Imds(clock=clock, sleep=clock.sleep)
    assert client.tag("lane") == "lane-01"
    assert clock.time == pytest.approx(2 * imds.PAUSE_S)
    assert client.get("meta-data/spot/instance-action") is None


def test_a_service_that_is_switched_off_is_not_waited_for(service: Service) -> None:
    service.refusals = [403]
    with pytest.raises(imds.ImdsError, match="switched off"):
        imds.Imds().tag("lane")


def test_a_machine_that_is_no_instance_is_said_after_the_patience() -> None:
    clock = Clock()
    with pytest.raises(imds.ImdsError, match=r"does not answer .*is this an EC2 instance"):
        imds.Imds("http://127.0.0.1:9", patience_s=1.0, clock=clock, sleep=clock.sleep).get("x")
    assert 0.9 < clock.time < 1.2


def test_the_command_says_why_it_cannot_start(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del service.documents["meta-data/tags/instance/lane"]
    assert main(["--imds", "--work", str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err
        == "the worker cannot start: this instance is no worker of a fleet: it has no tag lane\n"
    )
    with pytest.raises(SystemExit):
        main(["--work", str(tmp_path), "--root", "x"])
    assert "--fleet, --lane, --instance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "document", "said"),
    [
        (
            "spot/instance-action",
            {"action": "terminate", "time": "2026-11-29T17:00:00Z"},
            "takes this spot instance back: terminate at 2026",
        ),
        (
            "events/recommendations/rebalance",
            {"noticeTime": "2026-11-29T17:00:00Z"},
            "expects to take this spot instance back: 2026",
        ),
    ],
)
def test_a_notice_makes_the_agent_leave_once(
    service: Service, monkeypatch: pytest.MonkeyPatch, path: str, document: dict[str, str], said: str
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            service.documents[f"meta-data/{path}"] = json.dumps(document)

    monkeypatch.setattr(notice.time, "sleep", sleep)
    left: list[str] = []
    lines: list[str] = []
    notice.watch(left.append, lines.append, imds.Imds()).join(20)
    assert left == ["spot"]
    assert looks == [notice.EVERY_S] * 3
    assert len(lines) == 1 and said in lines[0]


def test_a_silent_service_is_logged_once_and_asked_on(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.refusals = [403, 403]
    monkeypatch.setattr(
        notice.time, "sleep", lambda _: service.documents.update({"meta-data/spot/instance-action": "not JSON"})
    )
    left: list[str] = []
    lines: list[str] = []
    notice.watch(left.append, lines.append, imds.Imds()).join(20)
    assert left == ["spot"]
    assert [line.split(":")[0] for line in lines] == [
        "no spot notice can be heard for now",
        "EC2 takes this spot instance back",
    ]
