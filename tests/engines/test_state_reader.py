"""State asked by key: `StateReader` against all of the state read anew, checkpoint by checkpoint."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from exactlyonce import Count, EventTime, KafkaSink, KafkaSource, Pipeline, Tumbling, Windowed
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.local.monitoring.server import serving
from exactlyonce.engines.local.monitoring.state_service import StateService
from exactlyonce.engines.savepoints.shown_state import KeyView, state_at
from exactlyonce.engines.savepoints.state_reader import StateReader
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.testing.cluster import KafkaCluster

CUSTOMERS = [f"c{number}" for number in range(30)]


class Order(msgspec.Struct):
    customer: str
    total: int
    at: int


class Total(msgspec.Struct, array_like=True):
    orders: int
    sum: int


def add(total: Total | None, order: Order) -> tuple[Total | None, int]:
    """A total of 0 forgets the customer."""
    if order.total == 0:
        return None, 0
    total = total or Total(0, 0)
    return Total(total.orders + 1, total.sum + order.total), order.total


def pipeline_of(name: str) -> Pipeline:
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-orders", value=Order, time=EventTime("at", disorder="5s")))
    by_customer = orders.key_by(lambda order: order.customer)
    by_customer.stateful_map("totals", add).sink("out", KafkaSink(f"{name}-out"))
    by_total = orders.key_by(lambda order: order.total)
    by_total.stateful_map("sizes", add).sink("sized", KafkaSink(f"{name}-out"))
    counts = by_customer.window(Tumbling("10s")).aggregate("counts", Count())

    def count_of(window: Windowed[Any, int]) -> int:
        return window.value

    counts.map(count_of, id="count").sink("counted", KafkaSink(f"{name}-out"))
    return pipeline


class Job:
    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name = kafka, name
        kafka.create_topic(f"{name}-orders", 2)
        kafka.create_topic(f"{name}-out")
        self.config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})

    def run(self, orders: list[Order], **options: Any) -> int:
        """Read *orders*, in one more run; its last checkpoint."""
        self.kafka.produce(
            f"{self.name}-orders", [(order.customer, msgspec.json.encode(order).decode()) for order in orders]
        )
        servers = self.kafka.bootstrap_servers
        options = {"inline": True, "until": "latest", "log_level": "error", **options}
        done = pipeline_of(self.name).run(bootstrap_servers=servers, **options)
        assert done is not None
        return done.checkpoint

    def anew(self, operator: str) -> list[KeyView]:
        """All states of *operator*, read by the code of `exactlyonce state show`."""
        with state_at(self.config, self.name) as view:
            return sorted(view.keys(operator), key=str)

    def reader(self, memory_bytes: int = 64 << 20) -> StateReader:
        return StateReader.of(self.config, self.name, memory_bytes)


@pytest.fixture
def job(kafka: KafkaCluster, topic_name: str) -> Job:
    return Job(kafka, topic_name)


def some_orders(dice: random.Random, begin_ms: int, count: int = 60) -> list[Order]:
    customers = dice.choices(CUSTOMERS, k=count)
    return [Order(each, dice.choice([0, 1, 2, 3]), begin_ms + dice.randrange(8_000)) for each in customers]


@pytest.mark.parametrize("memory_bytes", [1, 64 << 20])
def test_it_follows_the_checkpoints(job: Job, memory_bytes: int) -> None:
    """What was kept of a key group goes on with later blocks: changes, deletions, windows that are over, images."""
    dice = random.Random(memory_bytes)
    with job.reader(memory_bytes) as reader:
        with pytest.raises(ConfigError, match=r"no checkpoint|no pipeline|does not exist"):
            reader.get("totals", "c1")
        for round_ in range(4):
            checkpoint = job.run(some_orders(dice, 1_000 * 1_000 + 4_000 * round_))
            for operator in ("totals", "sizes", "counts"):
                keys = [canonical_key(key) for key in (*CUSTOMERS, 1, 2, 3)]
                reader.reach(checkpoint, "30s")
                found = reader.find(operator, keys)
                assert (found.checkpoint, sorted(found.states, key=str)) == (checkpoint, job.anew(operator))
                scanned = [view for group in reader.scan(operator) for view in group.states]
                assert sorted(scanned, key=str) == job.anew(operator)
            some = next(view for view in job.anew("totals"))
            assert reader.get("totals", some.key) == some.state
            assert reader.get("totals", "nobody") is None
            with pytest.raises(ConfigError, match="3 is no key of 'totals': its keys are str"):
                reader.get("totals", 3)
        with pytest.raises(ConfigError, match=r"'total'. Did you mean totals\?"):
            reader.get("total", "c1")
        with pytest.raises(TimeoutError, match=f"Checkpoint {checkpoint + 1} of {job.name} is not complete"):
            reader.get("totals", "c1", min_checkpoint=checkpoint + 1, timeout="200ms")


def test_what_is_kept_is_not_read_again(job: Job) -> None:
    orders = [Order(each, 1, 1_000_000) for each in CUSTOMERS]
    job.run(orders)
    with job.reader() as reader:
        keys = list(map(canonical_key, CUSTOMERS))
        reader.find("totals", keys)
        (recent,) = reader._recent.values()
        before = len(recent._bodies)
        checkpoint = job.run(orders[:1])
        reader.reach(checkpoint, "30s")
        found = reader.find("totals", keys)
        assert len(recent._bodies) <= before + 3, "one block of state, and two indexes"
        assert {view.key: view.state["orders"] for view in found.states} == dict.fromkeys(CUSTOMERS, 1) | {"c0": 2}


@pytest.mark.exhaustive
def test_many_ask_while_it_follows(job: Job) -> None:
    """Each answer is of one checkpoint: all customers have as many orders, since each run gives each one more."""
    orders, ended = [Order(each, 1, 1_000_000) for each in CUSTOMERS], threading.Event()
    job.run(orders)
    failures, latest = list[str](), list[int]()
    keys = list(map(canonical_key, CUSTOMERS))
    with job.reader() as reader:

        def ask() -> None:
            seen = 0
            while not ended.is_set():
                found = reader.find("totals", keys)
                counts = {view.state["orders"] for view in found.states}
                if len(counts) != 1 or len(found.states) != len(CUSTOMERS) or found.checkpoint < seen:
                    failures.append(f"{found.checkpoint} after {seen}: {counts}")
                seen = found.checkpoint
            latest.append(seen)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            newest = job.run(orders, checkpoint_interval="10m")
        reader.reach(newest, "30s")
        ended.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(latest) == len(threads)


class Client:
    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)

    def __call__(self, path: str, **headers: str | bytes) -> tuple[int, Any]:
        self._connection.request("GET", path, headers=headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def served(job: Job, token: str | None = None) -> Iterator[Client]:
    with (
        job.reader() as reader,
        StateService(reader, token).following() as paths,
        serving("127.0.0.1", 0, paths, keep_alive=True) as port,
    ):
        yield Client(port)


def test_over_http(job: Job) -> None:
    checkpoint = job.run([Order(each, 2, 1_000_000 + place) for place, each in enumerate([*CUSTOMERS, "a/b", "7"])])
    with served(job) as get:
        status, one = get("/state/totals/c3")
        assert (status, one["checkpoint"], one["key"]) == (200, checkpoint, "c3")
        assert one["state"] == {"orders": 1, "sum": 2}
        assert get(f"/state/totals/{quote('a/b', safe='')}")[1]["key"] == "a/b"
        assert get("/state/totals/7")[1]["key"] == "7", "its keys are texts"
        assert get("/state/sizes/2")[1]["key"] == 2
        several = get("/state/totals?key=c1&key=nobody&key=c2")[1]
        assert [each["key"] for each in several["states"]] == ["c1", "c2"]
        ranged = get("/state/totals?from=a&to=c12&limit=4")[1]["states"]
        assert [each["key"] for each in ranged] == ["a/b", *sorted(CUSTOMERS)[:3]]
        window = get("/state/counts/c3")[1]["states"]
        assert [(each["start"], each["state"]) for each in window] == [("1970-01-01T00:16:40Z", 1)]
        assert get(f"/state/totals/c3?min_checkpoint={checkpoint}")[0] == 200
        for path, wanted, why in (
            ("/state/totals/nobody", 404, "nobody has no state of 'totals' at checkpoint"),
            ("/state/total/c3", 404, "Did you mean totals?"),
            ("/state/sizes/many", 400, "many is no key of 'sizes': its keys are int"),
            ("/state/totals?limit=0", 400, "limit is from 1 to 1000"),
            ("/state/totals?keys=c1", 400, "There is no parameter keys"),
            ("/state/totals/c3?min_checkpoint=x", 400, "min_checkpoint is a number"),
            (f"/state/totals/c3?min_checkpoint={'9' * 5_000}", 400, "min_checkpoint is a number"),
            (f"/state/totals/c3?min_checkpoint={checkpoint + 1}", 504, "is not complete"),
            (f"/state/totals?from=a&min_checkpoint={checkpoint + 1}", 504, "is not complete"),
        ):
            status, answer = get(path)
            assert (status, why in answer["error"]) == (wanted, True), (path, answer)


def test_a_range_is_of_one_checkpoint(job: Job) -> None:
    """Each run gives each customer an order more; key groups are read while the next one is decided."""
    orders, ended, seen = [Order(each, 1, 1_000_000) for each in CUSTOMERS], threading.Event(), list[Any]()
    job.run(orders)
    with served(job) as get:

        def ask() -> None:
            while not ended.is_set():
                seen.append(get("/state/totals?from=a"))

        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(3):
            job.run(orders, checkpoint_interval="10m")
        ended.set()
        asking.join()
    assert {status for status, _ in seen} == {200}
    assert all(len({each["state"]["orders"] for each in answer["states"]}) == 1 for _, answer in seen)


def test_a_token(job: Job) -> None:
    job.run([Order("c1", 2, 1_000_000)])
    with served(job, "sécret à nous") as get:
        assert get("/state/totals/c1")[0] == 401
        assert get("/state/totals/c1", Authorization="Bearer secret")[0] == 401
        assert get("/state/totals/c1", Authorization="Bearer sécret à nous".encode())[0] == 200
