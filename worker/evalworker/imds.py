"""The instance metadata service, version 2: who this instance is, and which fleet its tags name.

Called by `python -m evalworker --imds` and by the watch for spot notices. Only the standard library, because the agent starts
with it; nothing here reads credentials (boto3 does that itself).
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from evalworker.contract.ids import check_run_id
from evalworker.worker import Config

ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The variable by which the AWS tools, too, are told of another address."""

TOKEN_S = 21600
"""How long a token is asked for: the longest that the service gives."""

TIMEOUT_S = 2.0
PAUSE_S = 0.1
PATIENCE_S = 120.0
"""How long the first answer is waited for: the agent starts before the network is up."""

LIFECYCLES: dict[str, Literal["spot", "on-demand"]] = {
    "spot": "spot",
    "on-demand": "on-demand",
    "scheduled": "on-demand",
}


class ImdsError(RuntimeError):
    """The metadata service cannot be used, or says too little; the text is one sentence."""


class Imds:
    """A session with the service. Not shared between threads."""

    def __init__(
        self,
        endpoint: str | None = None,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Args: endpoint: None takes the standard variable's, else the link-local address. patience_s: for each `get`."""
        self._base = (endpoint or os.environ.get(ENDPOINT) or "http://169.254.169.254").rstrip("/")
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._token: str | None = None
        # A proxy of the environment is for the internet; the service is this machine's own.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> str | None:
        """What stands at a path below `/latest/`, None where there is nothing. Raises ImdsError."""
        end = self._clock() + self._patience_s
        while True:
            try:
                if self._token is None:
                    self._token = self._ask("api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)})
                return self._ask(path, "GET", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 404:
                    return None
                reason = f"answers {error.code}"
                if error.code == 401:  # the token has expired
                    self._token = None
                elif error.code == 403:
                    raise ImdsError("the metadata service is switched off for this instance") from None
            except OSError as error:
                reason = f"does not answer ({error.reason if isinstance(error, urllib.error.URLError) else error})"
            if self._clock() >= end:
                raise ImdsError(f"the metadata service at {self._base} {reason}: is this an EC2 instance?")
            self._sleep(PAUSE_S)

    def tag(self, name: str) -> str | None:
        """The value of a tag of this instance; the launch template must allow tags in the metadata."""
        return self.get(f"meta-data/tags/instance/{name}")

    def _ask(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._base}/latest/{path}", method=method, headers=headers)  # noqa: S310
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8", "replace"))


@dataclass(frozen=True)
class Instance:
    """What an instance says of itself. `launched` in seconds since the epoch."""

    instance_id: str
    instance_type: str
    region: str
    lifecycle: Literal["spot", "on-demand"]
    launched: float


def instance(imds: Imds) -> Instance:
    """Who this instance is. Raises ImdsError."""
    text = imds.get("dynamic/instance-identity/document")
    try:
        document = json.loads(text or "")
        return Instance(
            instance_id=str(document["instanceId"]),
            instance_type=str(document["instanceType"]),
            region=str(document["region"]),
            lifecycle=LIFECYCLES.get(imds.get("meta-data/instance-life-cycle") or "", "on-demand"),
            launched=datetime.fromisoformat(document["pendingTime"]).timestamp(),
        )
    except (ValueError, KeyError, TypeError):
        raise ImdsError(f"the instance identity document cannot be read: {(text or 'there is none')[:200]}") from None


def config(imds: Imds, work: Path) -> Config:
    """The worker's configuration from identity and tags; also sets the region and the estate of this process, as other programs expect.

    Raises ImdsError when this is no instance of a fleet.
    """
    who = instance(imds)
    tags = {name: imds.tag(name) for name in ("fleet-id", "lane", "inspect-fleet-bucket", "inspect-fleet")}
    bucket = tags["inspect-fleet-bucket"] or os.environ.get("S3_BUCKET_NAME")
    if not tags["fleet-id"] or not tags["lane"] or not bucket:
        missing = [name for name in ("fleet-id", "lane", "inspect-fleet-bucket") if not tags[name]]
        raise ImdsError(f"this instance is no worker of a fleet: it has no tag {', '.join(missing)}")
    try:
        fleet_id = check_run_id(tags["fleet-id"])
    except ValueError as error:
        raise ImdsError(f"the tag fleet-id of this instance: {error}") from None
    os.environ.setdefault("AWS_DEFAULT_REGION", who.region)
    if tags["inspect-fleet"]:
        os.environ.setdefault("INSPECT_FLEET_NAME", tags["inspect-fleet"])
    return Config(
        root=f"s3://{bucket}",
        fleet_id=fleet_id,
        lane=tags["lane"],
        instance_id=who.instance_id,
        instance_type=who.instance_type,
        lifecycle=who.lifecycle,
        launched=who.launched,
        work=work,
        imds=True,
    )
