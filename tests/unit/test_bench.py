"""The shape of the benchmarks' figures, and what is drawn of them. Nothing is measured here."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evalworker import aws
from evalworker.contract.documents import Lane
from evalworker.queues import Queue

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks import each other by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in ("figures", "draw", "measure", "sqs_stub"):
        sys.modules.pop(name, None)


def test_a_bound_is_about_the_ratio_where_there_is_a_baseline() -> None:
    from figures import Figure

    assert Figure("n", 3.0, "s", bound=0.5, baseline=10.0).holds is True
    assert Figure("n", 6.0, "s", bound=0.5, baseline=10.0).holds is False
    assert Figure("n", 0.6, "s", bound=0.5).holds is False
    assert Figure("n", 5.0, "/s", bound=4.0, at_least=True).holds is True
    assert Figure("n", 3.0, "/s", bound=4.0, at_least=True).holds is False
    assert Figure("n", 3.0, "s").holds is None


def test_a_drawing_has_a_bar_for_each_bounded_figure() -> None:
    import draw
    from figures import Figure

    kept, missed = Figure("a < b", 1.0, "s", bound=2.0), Figure("rate", 2.0, "/s", bound=4.0, at_least=True)
    record = {"figures": [one.to_dict() for one in (kept, missed, Figure("only told", 1.0, "s"))]}
    text = draw.svg([record, record])
    root = ElementTree.fromstring(text)
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("x")]
    assert [float(bar.get("width", 0)) for bar in bars] == [draw.BARS * 0.5, draw.BARS * draw.LONGEST]
    assert bars[0].get("fill") != bars[1].get("fill")
    assert "a &lt; b" in text
    assert "only told" not in text


def test_there_is_nothing_to_draw_before_the_first_run() -> None:
    import draw

    with pytest.raises(ValueError, match="make bench"):
        draw.svg([])


def test_commands_count_the_cpu_of_children_and_report_a_failure(tmp_path: Path) -> None:
    import measure

    burn = "import time\nwhile time.process_time() < 0.2: pass"
    words = [sys.executable, "-S", "-c", burn]
    spent = measure.commands([words, words], tmp_path, {}, at_once=2)
    assert spent.cpu_s >= 0.4
    with pytest.raises(RuntimeError, match="ended with 3: said why"):
        measure.command([sys.executable, "-S", "-c", "print('said why'); raise SystemExit(3)"], tmp_path, {})


def test_the_server_that_benchmarks_ask_is_sqs_to_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    from sqs_stub import Sqs

    body = "a message"
    digest = hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()
    message = {"MessageId": "m", "ReceiptHandle": "r", "MD5OfBody": digest, "Body": body}
    message |= {"Attributes": {"ApproximateReceiveCount": "1"}}
    served = Sqs(lambda: json.dumps({"Messages": [message]}).encode())
    threading.Thread(target=served.serve_forever, daemon=True).start()
    aws.forget_clients()
    try:
        url = f"{served.url}/0/q"
        queue = Queue(aws.sqs(Lane(name="l", jobs=url, events=url, dead=url, endpoint=served.url)), url)
        queue.send([body] * 12)
        (received,) = queue.receive(1, 0)
        assert (received.body, received.receipt) == (body, "r")
        assert queue.delete([received.receipt]) == set()
    finally:
        served.shutdown()
        served.server_close()
        aws.forget_clients()
