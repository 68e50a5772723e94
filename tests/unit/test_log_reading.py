"""`evalops.logs.reading` and `cache`: what reading costs, what is remembered, and logs that change while they are read."""

import json
from datetime import UTC, datetime

import logmaker
import pytest

from evalops.logs import reading
from evalops.logs.cache import FactsCache
from evalops.logs.facts import identity
from evalops.logs.packing import SourceChanged, pack
from evalops.logs.reading import list_directory, read_all, read_facts
from evalworker.storage import Info, Missing


class Memory:
    """A store in memory that counts reads and can change an object between two of them."""

    def __init__(self, **objects: bytes) -> None:
        self.objects = dict(objects)
        self.reads: list[tuple[int, int]] = []
        self.after: dict[int, bytes | None] = {}

    def info(self, key: str = "a.eval") -> Info:
        body = self.objects[key]
        return Info(key, len(body), str(hash(body)), datetime.now(UTC))

    def head(self, key):
        return self.info(key) if key in self.objects else None

    def read_range(self, key, start, length):
        self.reads.append((start, length))
        if len(self.reads) in self.after:
            body = self.after.pop(len(self.reads))
            self.objects.pop(key)
            if body is not None:
                self.objects[key] = body
        if key not in self.objects:
            raise Missing(f"there is no {key}")
        return self.objects[key][start : start + length]

    def url(self, key):
        return key

    def list(self, prefix):
        return (self.info(key) for key in sorted(self.objects) if key.startswith(prefix))


def _bytes(tmp_path, **what) -> bytes:
    path = logmaker.make(tmp_path, **what)
    body = path.read_bytes()
    path.unlink()
    return body


def test_a_small_log_costs_one_read_and_a_large_one_two(tmp_path):
    store = Memory(**{"a.eval": _bytes(tmp_path)})
    assert read_facts(store, store.info()).status == "success"
    assert len(store.reads) == 1
    many = [logmaker.sample(i, explanation=f"{i} " * 300) for i in range(1, 1501)]
    store = Memory(**{"a.eval": _bytes(tmp_path, total=1500, samples=many)})
    facts = read_facts(store, store.info())
    assert (facts.status, facts.completed, facts.errored) == ("success", 1500, 0)
    assert len(store.reads) <= 2 and sum(length for _, length in store.reads) < 150_000


def test_an_unfinished_log_costs_four_reads_at_the_most(tmp_path):
    many = [logmaker.sample(i, explanation=f"{i} " * 300) for i in range(1, 1501)]
    path = logmaker.started(logmaker.make(tmp_path, total=2000, samples=many))
    store = Memory(**{"a.eval": path.read_bytes()})
    facts = read_facts(store, store.info())
    assert (facts.status, facts.logged, facts.total) == ("started", 1500, 2000)
    assert len(store.reads) <= reading.REQUESTS_PER_LOG


def test_a_log_that_is_replaced_while_it_is_read_is_read_once_more(tmp_path):
    old, new = _bytes(tmp_path, total=4), _bytes(tmp_path, total=40)
    store = Memory(**{"a.eval": old})
    info = store.info()
    store.after = {1: new}
    facts = read_facts(store, info)
    assert (facts.status, facts.total) == ("success", 40)


def test_a_log_that_is_replaced_again_and_again_is_said_to_be_written(tmp_path):
    bodies = [_bytes(tmp_path, total=total) for total in (4, 40, 80)]
    store = Memory(**{"a.eval": bodies[0]})
    info = store.info()
    store.after = {1: bodies[1][:-7], 2: bodies[2][:-9]}
    facts = read_facts(store, info)
    assert (facts.status, facts.replaced) == ("unreadable", True)
    assert "being written" in (facts.reason or "")


def test_a_log_that_goes_away_is_no_error(tmp_path):
    store = Memory(**{"a.eval": _bytes(tmp_path)})
    info = store.info()
    store.after = {1: None}
    assert "removed" in (read_facts(store, info).reason or "")


def test_what_was_read_is_not_read_again_until_it_changes(tmp_path):
    store = Memory(**{f"{n}.eval": _bytes(tmp_path, number=n) for n in range(1, 6)})
    store.objects["bad.eval"] = b"broken"

    def look():
        store.reads.clear()
        cache = FactsCache("memory", tmp_path / "cache")
        return [one.facts for one in read_all(store, list_directory(store, "").logs, cache)]

    first = look()
    assert len(store.reads) >= 6
    assert look() == first and store.reads == []
    store.objects["3.eval"] = _bytes(tmp_path, number=3, total=8)
    assert [facts.total for facts in look()] == [4, 4, 8, 4, 4, None]
    assert len(store.reads) == 1


@pytest.mark.parametrize(
    "damage", ["", "{", '{"version": 0, "entries": {}}', '{"version": 1, "entries": {"a.eval": [1]}}', "[]"]
)
def test_a_damaged_cache_is_an_empty_one(tmp_path, damage):
    store = Memory(**{"a.eval": _bytes(tmp_path)})
    for _ in range(2):
        read_all(store, [store.info()], FactsCache("m", tmp_path / "cache"))
        for path in (tmp_path / "cache").rglob("*.json"):
            path.write_text(damage.replace('"a.eval": [1]', '"a.eval": ["x", 1, {}]'))
    assert read_all(store, [store.info()], FactsCache("m", tmp_path / "cache"))[0].facts.status == "success"


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path):
    (tmp_path / "cache").write_text("a file where the directory should be")
    store = Memory(**{"a.eval": _bytes(tmp_path)})
    assert len(read_all(store, [store.info()], FactsCache("m", tmp_path / "cache"))) == 1


def test_retries_share_an_identity_and_other_experiments_do_not():
    def of(**what):
        return identity(logmaker.log(**what).eval)

    same = of(number=1)
    assert of(number=2) == same, "another attempt"
    assert of(model="a/b") != same and of(task="t") != same and of(task_args={"n": 1}) != same
    cooler = logmaker.log()
    cooler.eval.model_generate_config.temperature = 0.1
    assert identity(cooler.eval) != same
    faster = logmaker.log()
    faster.eval.model_generate_config.max_connections = 99
    assert identity(faster.eval) == same


def test_a_task_is_known_by_its_file_below_the_submit_directory_wherever_that_is():
    def of(file):
        made = logmaker.log()
        made.eval.task_file = file
        return identity(made.eval)

    assert len({of(file) for file in (None, "a.py", "b.py", "sub/a.py")}) == 4
    assert of("/container/code/tasks/a.py") == of("/home/me/tasks/a.py") == of("../tasks/a.py")


def test_times_are_utc_whatever_the_log_has(tmp_path):
    made = logmaker.log()
    made.eval.created = "2025-02-20T16:28:45+11:00"
    path = logmaker.write(tmp_path, made)
    store = Memory(**{"a.eval": path.read_bytes()})
    assert read_facts(store, store.info()).created == datetime(2025, 2, 20, 5, 28, 45, tzinfo=UTC)


def test_a_log_that_is_rewritten_while_it_is_packed_is_not_published(tmp_path):
    store = Memory(**{"a.eval": _bytes(tmp_path)})
    info = store.info()
    store.after = {2: _bytes(tmp_path, total=8)}
    with pytest.raises(SourceChanged):
        pack(store, info, "a.eval.zip", None)


def test_a_header_that_todays_inspect_cannot_read_says_why(tmp_path):
    path = logmaker.edit_header(logmaker.make(tmp_path), lambda header: header.update(status="sideways"))
    store = Memory(**{"a.eval": path.read_bytes()})
    facts = read_facts(store, store.info())
    assert facts.status == "unreadable" and "today's Inspect cannot read its header" in (facts.reason or "")
    json.dumps(facts.model_dump(mode="json"))
