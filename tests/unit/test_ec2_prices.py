"""What machines cost: steps of prices, AWS's answers, the table, the book. No AWS."""

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import botocore.session
import pytest
from botocore.stub import ANY, Stubber
from hypothesis import given
from hypothesis import strategies as st

from evalops.ec2 import estimate, prices
from evalops.ec2.machines import Book
from evalops.ec2.prices import Prices, Quote, Step
from evalops.fleet.spending import spending
from evalworker.contract.documents import JobSpec, MachineRecord

T0 = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


def client(service: str) -> Any:
    return botocore.session.Session().create_client(
        service, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )


def test_an_instance_pays_each_price_while_it_is_in_force() -> None:
    quote = Quote((Step(at(-500), 0.06), Step(at(30), 0.12), Step(at(90), 0.24)), "x")
    assert quote.cost(T0, at(30)) == pytest.approx(0.03)
    assert quote.cost(T0, at(60)) == pytest.approx(0.03 + 0.06)
    assert quote.cost(at(30), at(120)) == pytest.approx(0.12 + 0.12)
    assert quote.usd_per_hour == 0.24


def test_a_minute_is_the_least() -> None:
    quote = Quote((Step(at(-1), 6.0),), "x")
    assert quote.cost(T0, T0 + timedelta(seconds=3)) == pytest.approx(0.1)


@given(
    st.lists(st.tuples(st.integers(-600, 600), st.floats(0.001, 10)), min_size=1, unique_by=lambda point: point[0]),
    st.integers(1, 600),
)
def test_a_cost_lies_between_its_extreme_prices_and_adds_up(points: list[tuple[int, float]], minutes: int) -> None:
    steps = prices.steps_of([(at(minute), price) for minute, price in points], T0)
    quote, hours = Quote(steps, "x"), minutes / 60
    low, high = min(step.usd_per_hour for step in steps), max(step.usd_per_hour for step in steps)
    cost = quote.cost(T0, at(minutes))
    assert low * hours - 1e-9 <= cost <= high * hours + 1e-9
    if minutes >= 3:
        half = minutes // 2
        assert quote.cost(T0, at(half)) + quote.cost(at(half), at(minutes)) == pytest.approx(cost)


def test_spot_prices_are_of_the_zone_and_asked_for_once() -> None:
    ec2 = client("ec2")
    history = [
        {"InstanceType": "m5.large", "AvailabilityZone": zone, "SpotPrice": price, "Timestamp": moment}
        for zone, price, moment in (
            ("a", "0.04", at(20)), ("a", "0.03", at(-60)), ("b", "0.05", at(-60)), ("a", "0.02", at(-90)),
        )
    ]  # fmt: skip
    with Stubber(ec2) as stub:
        expected = {"InstanceTypes": ["m5.large"], "ProductDescriptions": ["Linux/UNIX"], "StartTime": T0}
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": history}, expected)
        book = Prices("us-east-1", ec2, clock=lambda: at(30))
        quote = book.quote("spot", "m5.large", "a", T0)
        assert quote is not None
        assert quote.steps == (Step(at(-60), 0.03), Step(at(20), 0.04))
        assert book.quote("spot", "m5.large", "b", at(5)) is not None
        assert book.quote("spot", "m5.large", "c", T0) is None
        assert book.quote("spot", "m5.large", None, T0) is None
        assert book.cheapest_spot("m5.large") == 0.04
        stub.assert_no_pending_responses()


def product(*usd: str) -> str:
    dimensions = {str(index): {"unit": "Hrs", "pricePerUnit": {"USD": price}} for index, price in enumerate(usd)}
    return json.dumps({"terms": {"OnDemand": {"t": {"priceDimensions": dimensions}}}})


@pytest.mark.parametrize(
    ("listed", "price", "source"),
    [
        ([product("0.1008000000")], 0.1008, "AWS price list"),
        ([product("0.0000000000")], 0.1008, "table of 2025-06-01"),
        ([product("0.1"), product("0.2")], 0.1008, "table of 2025-06-01"),
        ([], 0.1008, "table of 2025-06-01"),
    ],
)
def test_on_demand_prices_are_of_the_price_list_else_of_the_dated_table(
    listed: list[str], price: float, source: str
) -> None:
    price_list = client("pricing")
    with Stubber(price_list) as stub:
        stub.add_response("get_products", {"PriceList": listed}, {"ServiceCode": "AmazonEC2", "Filters": ANY})
        quote = Prices("us-east-1", price_list=price_list).on_demand("m7i.large")
    assert quote is not None
    assert (quote.usd_per_hour, quote.source) == (pytest.approx(price), source)


def test_an_unknown_price_is_none_and_never_zero() -> None:
    assert prices.table_price("x9.large", "us-east-1") is None
    assert prices.table_price("m7i.large", "eu-west-9") is None
    assert prices.table_price("m7i.metal", "us-east-1") is None
    ec2, price_list = client("ec2"), client("pricing")
    with Stubber(ec2) as asked, Stubber(price_list) as listed:
        asked.add_client_error("describe_spot_price_history", "UnauthorizedOperation")
        listed.add_client_error("get_products", "AccessDeniedException")
        book = Book("2026-11-29-14-05-33-1a2b3c4d", Prices("eu-west-9", ec2, price_list))
        book.launched("i-1", "m7i.large", "spot", T0, "a")
        book.launched("i-2", "m7i.large", "on-demand", T0, "a")
        spent = book.reckon(at(60))
    assert spent.usd is None
    assert spent.known_usd == 0
    assert spent.note == "no price is known for m7i.large spot, m7i.large on-demand"


def record(name: str, **more: Any) -> MachineRecord:
    return MachineRecord(instance_id=name, instance_type="m5.large", market="spot", launched=T0, **more)


def test_what_still_runs_goes_on_costing() -> None:
    records = [
        record("i-1", usd=1.0, usd_per_hour=0.6, price_from="table of 2025-06-01"),
        record("i-2", usd=2.0, usd_per_hour=0.6, ended=at(10)),
    ]
    spent = spending(records, at(60), at(90))
    assert (spent.usd, spent.per_hour, spent.running) == (pytest.approx(3.3), 0.6, 1)
    assert spent.note == "on-demand prices are of the table of 2025-06-01"
    partly = spending([*records, record("i-3")], at(60), at(60))
    assert (partly.usd, partly.known_usd, partly.unpriced) == (None, 3.0, ["m5.large spot"])


def test_an_end_counts_once_and_a_zone_is_completed() -> None:
    book = Book("2026-11-29-14-05-33-1a2b3c4d", Prices("nowhere"))
    book.launched("i-1", "m5.large", "spot", at(1))
    book.launched("i-1", "m5.large", "spot", T0, "a")
    book.ended("i-1", at(5))
    book.all_ended(at(9))
    assert book.records["i-1"] == record("i-1", zone="a", ended=at(5))


def test_an_estimate_counts_the_jobs_that_a_worker_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [JobSpec(job_id=f"{n:016x}", task="t.py@t", name="t", model="m", samples=1) for n in range(4)]
    past = {spec.job_id: estimate.Past("f", 3600.0, None) for spec in jobs}
    monkeypatch.setattr(estimate, "earlier", lambda *_: past)
    monkeypatch.setattr(estimate, "rates", lambda *_: [])
    nothing: Any = SimpleNamespace(region="us-east-1")
    assert estimate.estimate(nothing, nothing, nothing, jobs, 1, 1).hours == 4
    assert estimate.estimate(nothing, nothing, nothing, jobs, 1, 2).hours == 2
