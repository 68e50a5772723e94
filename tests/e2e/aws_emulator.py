"""moto's server in a process of its own, and a record of the calls that reach it.

The e2e tests of Terraform and of what is built on the applied estate start one. Each request is written as one line
`<who>\t<service>:<Operation>` to a file, which `iam_calls` compares with the policies; `who` is the access key's name. Run
as a program: `aws_emulator.py PORT RECORD_FILE` serves until it is killed.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_SCOPE = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/")
_REST = {"s3", "batch", "lambda"}
_NAMES = {"monitoring": "cloudwatch", "email": "ses"}


@cache
def _rest_operations(service: str) -> list[tuple[str, re.Pattern[str], frozenset[str], str]]:
    """(method, path, required query, operation) of a REST service, the most specific first, from botocore's own model."""
    import botocore.session

    model = botocore.session.get_session().get_service_model(service)
    found = []
    for name in model.operation_names:
        if model.operation_model(name).deprecated:
            continue
        http = model.operation_model(name).http
        path, _, query = http["requestUri"].partition("?")
        pattern = re.escape(path)
        pattern = re.sub(r"\\\{[A-Za-z]+\\\+\\\}", ".+", pattern)
        pattern = re.sub(r"\\\{[A-Za-z]+\\\}", "[^/]+", pattern)
        shape = model.operation_model(name).input_shape
        members = shape.members.items() if shape else ()
        required = set(shape.required_members) if shape else set()
        keys = {key for key in query.split("&") if key and not key.startswith("x-id=")}
        keys |= {
            m.serialization.get("name", k)
            for k, m in members
            if k in required and m.serialization.get("location") == "querystring"
        }
        found.append((http["method"], re.compile(pattern + "/?"), frozenset(keys), name))
    return sorted(found, key=lambda entry: -len(entry[2]))


def operation(environ: dict[str, Any], body: bytes) -> tuple[str, str] | None:
    """(access key, "service:Operation") of one request; None where it carries no signature."""
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    if not scope:
        return None
    key, _, service = scope.groups()
    service = _NAMES.get(service, service)
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return key, f"{service}:{target.rsplit('.', 1)[-1]}"
    if service not in _REST:
        form = urllib.parse.parse_qs(body.decode("utf-8", "replace")) | urllib.parse.parse_qs(
            environ.get("QUERY_STRING", "")
        )
        action = form.get("Action") or [environ.get("PATH_INFO", "").rsplit("/", 1)[-1]]
        return key, f"{service}:{action[0]}"
    query = urllib.parse.parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    given = set(query) | {f"{k}={v[0]}" for k, v in query.items()}
    for method, path, needed, name in _rest_operations(service):
        if (
            method != environ["REQUEST_METHOD"]
            or not path.fullmatch(environ.get("PATH_INFO", ""))
            or not needed <= given
        ):
            continue
        copied = "HTTP_X_AMZ_COPY_SOURCE" in environ
        if name in ("PutObject", "CopyObject") and copied != (name == "CopyObject"):
            continue
        if name in ("UploadPart", "UploadPartCopy") and copied != (name == "UploadPartCopy"):
            continue
        if name == "ListObjects" and "list-type" in query:
            continue
        return key, f"{service}:{name}"
    return key, f"{service}:{environ['REQUEST_METHOD']} {environ.get('PATH_INFO')}?{environ.get('QUERY_STRING')}"


def recording(app: Callable[..., Iterable[bytes]], record: Path) -> Callable[..., Iterable[bytes]]:
    """The application, with each request's operation appended to `record` before it is served."""
    import io

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = b""
        if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
        if found := operation(environ, body):
            with record.open("a") as lines:
                lines.write("\t".join(found) + "\n")
        return app(environ, start_response)

    return serve


@dataclass
class Emulator:
    """A running server. `calls()` are the distinct ("who", "service:Operation") so far."""

    url: str
    record: Path
    process: subprocess.Popen[bytes]

    def calls(self) -> set[tuple[str, str]]:
        """What was called so far, by access key."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return {(who, call) for who, _, call in (line.partition("\t") for line in lines)}

    def environment(self, who: str = "operator") -> dict[str, str]:
        """What a shell needs to talk to it: `who` becomes the access key, and nothing of the caller's own AWS set-up stays."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AWS_") or k == "AWS_CA_BUNDLE"}
        return kept | {
            "AWS_ACCESS_KEY_ID": who,
            "AWS_SECRET_ACCESS_KEY": "emulator",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def stop(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait(10)


def start(directory: Path) -> Emulator:
    """A fresh server on a free port of 127.0.0.1; its log and record are in `directory`."""
    from ports import free_port  # not above: as a program, this file is alone

    port = free_port()
    record = directory / "calls.tsv"
    environ = os.environ | {
        "MOTO_AMIS_PATH": str(HERE / "data" / "amis.json"),
        "MOTO_IAM_LOAD_MANAGED_POLICIES": "true",
    }
    with (directory / "emulator.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(port), str(record)], env=environ, stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        if process.poll() is not None:
            raise RuntimeError(f"the emulator ended: {(directory / 'emulator.log').read_text()[-2000:]}")
        try:
            configure(url, {"batch": {"use_docker": True}})
            return Emulator(url, record, process)
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise RuntimeError("the emulator did not answer within a minute")


def configure(url: str, options: dict[str, Any]) -> None:
    """Set moto's own options."""
    request = urllib.request.Request(f"{url}/moto-api/config", json.dumps(options).encode(), method="POST")
    urllib.request.urlopen(request, timeout=5).read()


def main(port: int, record: Path) -> None:
    """Serve until killed."""
    import batch_bench
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    batch_bench.install(port)
    app = recording(DomainDispatcherApplication(create_backend_app), record)
    make_server("127.0.0.1", port, app, threaded=True, request_handler=MotoRequestHandler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
