"""What instances cost: seconds times the price that was in force, by AWS's own price APIs where they answer.

Called by the controller (through `machines`), `--estimate` and `ct fleet cost`. Spot prices change, so each instance is reckoned by the
steps of its own zone's history. An unknown price is None and is said, never 0.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from importlib import resources
from typing import Any

import yaml
from botocore.exceptions import BotoCoreError, ClientError

from evalworker import aws
from evalworker.contract.documents import Market
from evalworker.contract.wire import now

LEAST_S = 60.0
"""EC2 bills by the second, but a minute at least."""

FRESH_S = 300.0
"""How long a spot price history is taken for current."""

PRICE_LIST_REGION = "us-east-1"
"""Where the price list API lives; it knows all regions."""

Key = tuple[str, str]
"""An instance type and its availability zone."""


@dataclass(frozen=True)
class Step:
    """A price from a moment on."""

    since: datetime
    usd_per_hour: float


@dataclass(frozen=True)
class Quote:
    """The steps of a price, oldest first, and where they are from."""

    steps: tuple[Step, ...]
    source: str

    @property
    def usd_per_hour(self) -> float:
        """The newest price."""
        return self.steps[-1].usd_per_hour

    def cost(self, start: datetime, end: datetime) -> float:
        """Dollars for an instance from `start` to `end`, a minute at least."""
        end = max(end, start + timedelta(seconds=LEAST_S))
        total = 0.0
        for index, step in enumerate(self.steps):
            begins = start if index == 0 else max(start, step.since)
            ends = self.steps[index + 1].since if index + 1 < len(self.steps) else end
            total += max(0.0, (min(ends, end) - begins).total_seconds()) * step.usd_per_hour / 3600
        return total


def steps_of(points: Iterable[tuple[datetime, float]], start: datetime) -> tuple[Step, ...]:
    """Points of a price history in any order as steps: the last point before `start` and all later ones."""
    ordered = sorted(points)
    before = [point for point in ordered if point[0] <= start][-1:]
    return tuple(Step(*point) for point in [*before, *(point for point in ordered if point[0] > start)])


class Prices:
    """The prices of one region, asked for when needed and kept. Not shared between threads."""

    def __init__(
        self, region: str, ec2: Any = None, price_list: Any = None, clock: Callable[[], datetime] = now
    ) -> None:
        """Args: ec2, price_list: clients; None makes them when they are needed."""
        self._region = region
        self._ec2 = ec2
        self._price_list = price_list
        self._clock = clock
        self._spot: dict[str, tuple[datetime, datetime, dict[Key, tuple[Step, ...]]]] = {}
        self._on_demand: dict[str, Quote | None] = {}

    def quote(self, market: Market, instance_type: str, zone: str | None, start: datetime) -> Quote | None:
        """The price of an instance since `start`; None where none is known. Raises ServiceError for unusable credentials alone."""
        if market == "on-demand":
            return self.on_demand(instance_type)
        if zone is None:
            return None
        steps = self.spot(instance_type, start).get((instance_type, zone))
        return Quote(steps, f"spot price history of {zone}") if steps else None

    def spot(self, instance_type: str, start: datetime) -> dict[Key, tuple[Step, ...]]:
        """A type's spot prices by zone since `start`; empty when EC2 does not say."""
        asked, since, found = self._spot.get(instance_type, (None, None, {}))
        if (
            asked is not None
            and since is not None
            and since <= start
            and self._clock() - asked < timedelta(seconds=FRESH_S)
        ):
            return found
        points: dict[Key, list[tuple[datetime, float]]] = {}
        for entry in self._spot_history(instance_type, start):
            key = (entry["InstanceType"], entry["AvailabilityZone"])
            points.setdefault(key, []).append((_moment(entry["Timestamp"]), float(entry["SpotPrice"])))
        fresh = {key: steps_of(some, start) for key, some in points.items()}
        self._spot[instance_type] = (self._clock(), start, fresh or found)
        return fresh or found

    def cheapest_spot(self, instance_type: str) -> float | None:
        """The lowest spot price of a type over the region's zones now."""
        current = [steps[-1].usd_per_hour for steps in self.spot(instance_type, self._clock()).values()]
        return min(current, default=None)

    def on_demand(self, instance_type: str) -> Quote | None:
        """The on-demand price: of the price list, else of the table that comes with this project."""
        if instance_type not in self._on_demand:
            listed = self._listed(instance_type)
            self._on_demand[instance_type] = listed or table_price(instance_type, self._region)
        return self._on_demand[instance_type]

    def _spot_history(self, instance_type: str, start: datetime) -> list[dict[str, Any]]:
        try:
            client = self._ec2 or aws.client("ec2", self._region)
            pages = client.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=[instance_type], ProductDescriptions=["Linux/UNIX"], StartTime=start
            )
            return [entry for page in pages for entry in page["SpotPriceHistory"]]
        except (ClientError, BotoCoreError) as error:
            _unless_credentials(error)
            return []

    def _listed(self, instance_type: str) -> Quote | None:
        wanted = {
            "instanceType": instance_type,
            "regionCode": self._region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
        try:
            client = self._price_list or aws.client("pricing", PRICE_LIST_REGION)
            products = client.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
        except (ClientError, BotoCoreError, KeyError) as error:
            _unless_credentials(error)
            return None
        found = [price for product in products for price in _hourly(json.loads(product))]
        if len(found) != 1:
            return None
        return Quote((Step(datetime.min.replace(tzinfo=self._clock().tzinfo), found[0]),), "AWS price list")


def _unless_credentials(error: BaseException) -> None:
    if aws.explain(error).credentials:
        raise aws.ServiceError.of(error, "cannot ask for prices") from error


def _hourly(product: dict[str, Any]) -> list[float]:
    """The positive hourly on-demand prices in a product of the price list."""
    dimensions = [
        dimension
        for term in product.get("terms", {}).get("OnDemand", {}).values()
        for dimension in term.get("priceDimensions", {}).values()
    ]
    prices = [float(each.get("pricePerUnit", {}).get("USD", 0)) for each in dimensions if each.get("unit") == "Hrs"]
    return [price for price in prices if price > 0]


def _moment(value: datetime | str) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def table_price(instance_type: str, region: str) -> Quote | None:
    """The on-demand price that the checked-in table has; None for a type or a region that it does not."""
    table = yaml.safe_load(resources.files("evalops.ec2").joinpath("on_demand.yaml").read_text("utf-8"))
    family, _, size = instance_type.partition(".")
    if region not in table["regions"] or family not in table["large"] or size not in table["sizes"]:
        return None
    dated: date = table["date"]
    since = datetime.min.replace(tzinfo=now().tzinfo)
    return Quote((Step(since, table["large"][family] * table["sizes"][size]),), f"table of {dated:%Y-%m-%d}")
