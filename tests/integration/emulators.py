"""What a running emulator is to a test; `conftest` starts them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import botocore.session
from botocore.config import Config

from evalworker.contract.documents import Lane

REGION = "us-east-1"


@dataclass(frozen=True)
class Emulator:
    """A running server. `name` is ministack or moto; where the two differ, a test asks for it."""

    name: str
    endpoint: str

    def client(self, service: str, **config: Any) -> Any:
        """A plain client of a service of this server, made once: reading EC2's model takes a second."""
        return _client(self.endpoint, service, tuple(sorted(config.items())))

    def lane(self, name: str) -> Lane:
        """A lane whose queues are this server's; their URLs are left open."""
        return Lane(name=name, jobs="", events="", dead="", region=REGION, endpoint=self.endpoint)


@cache
def _client(endpoint: str, service: str, config: tuple[tuple[str, Any], ...]) -> Any:
    return botocore.session.Session().create_client(
        service,
        region_name=REGION,
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"mode": "standard", "max_attempts": 1}, **dict(config)),
    )
