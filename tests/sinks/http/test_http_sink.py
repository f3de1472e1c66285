"""Requests over HTTP: their numbers, the meaning of answers, zombies that send, dead letters, and secrets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from flushing import staged
from http_receiver import Service
from secured_kafka import make_certificate
from waiting import until

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.codec import JsonCodec
from exactlyonce.pipeline.dead_letters import DeadLetterLimits, Reason
from exactlyonce.pipeline.errors import ConfigError, Fenced, RecordsRefused, StoreError, StoreUnavailable, StoreUnready
from exactlyonce.pipeline.failpoints import FailpointRaised
from exactlyonce.sinks import HttpSink
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.http import committer as module
from exactlyonce.sinks.http.requests import StagedRows, Window, windows
from exactlyonce.sinks.http.sink import LANES
from exactlyonce.sinks.writer import WriterContext
from exactlyonce.testing.cluster import Committed, KafkaCluster
from exactlyonce.testing.sink_contract.hooks import ORIGIN, MemoryBlocks, MemoryStaging, again

pytestmark = pytest.mark.broker
TOKEN = "hunter2-of-the-hook"


class Order(msgspec.Struct):
    id: int
    customer: str = "ann"


def customer(order: Order) -> str:
    return order.customer


class Hook:
    """A sink "hook" of a pipeline, its service, and the topic of its dead letters."""

    def __init__(self, kafka: KafkaCluster, name: str, service: Service) -> None:
        self.kafka, self.name, self.service = kafka, name, service
        self.client = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
        self.dead = kafka.create_topic(f"{name}-dead")
        self.blocks = MemoryBlocks()
        self.limits: DeadLetterLimits | None = None
        self.keeps_letters = True
        self.options: dict[str, Any] = {"key": customer, "timeout": "30s"}
        self._lives = 0
        self._opened: list[Committer] = []

    @property
    def sink(self) -> HttpSink[Order]:
        return HttpSink(self.service.url, **self.options)

    def committer(self) -> Committer:
        assert list(self.sink.problems(Order)) == []
        context = CommitterContext(
            pipeline=self.name, sink="hook", type=Order, blocks=self.blocks, client=self.client,
            letters=self.dead if self.keeps_letters else "", letter_limits=self.limits,
        )  # fmt: skip
        self._opened.append(self.sink.open_committer(context))
        return self._opened[-1]

    def led(self, incarnation: int = 1) -> Committer:
        committer = self.committer()
        again(committer.check)
        again(lambda: committer.fence(incarnation, ORIGIN))
        return committer

    def staged(self, records: Sequence[Order], checkpoint: int = 1) -> StoreCommittable:
        """Records that wait; the checkpoint before has been committed."""
        self._lives += 1
        context = WriterContext(
            pipeline=self.name, sink="hook", subtask=0, incarnation=self._lives, attempt=0, type=Order,
            clients=cast(Any, None), staging=MemoryStaging(self.blocks, "hook", 0, self._lives),
        )  # fmt: skip
        writer, encoder = self.sink.open_writer(context)
        writer.write(encoder.encode(records))
        writer.barrier(checkpoint)
        return msgspec.structs.replace(staged(writer, checkpoint), previous=checkpoint - 1)

    def ids(self) -> list[int]:
        return [order["id"] for order in self.service.counted()]

    def letters(self) -> list[Committed]:
        return self.kafka.read_committed(self.dead)

    def close(self) -> None:
        for committer in self._opened:
            committer.close()


@pytest.fixture
def hook(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Iterator[Hook]:
    service = Service(tmp_path / "service")
    hook = Hook(kafka, topic_name, service)
    yield hook
    service.kill()
    hook.close()


def some(count: int, first: int = 1) -> list[Order]:
    return [Order(id, f"c{id % 7}") for id in range(first, first + count)]


def refusing(action: Callable[[], object], kind: type[Exception], text: str) -> str:
    with pytest.raises(kind, match=text) as raised:
        action()
    return str(raised.value)


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_cut_anew_from_any_of_their_ends_give_the_same_requests(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exactlyonce.sinks.http.requests.WINDOW_REQUESTS", 10)
    monkeypatch.setattr("exactlyonce.sinks.http.requests.WINDOW_BYTES", 700)
    sink: HttpSink[Order] = HttpSink("http://a", key=customer, batch=batch)
    rows = StagedRows(JsonCodec(Order), sink.key).encode(some(200))
    chunks = [b"".join(rows[:70]), b"".join(rows[70:])]
    found = list(windows(chunks, 0, batch))
    assert len(found) > 5
    for number, window in enumerate(found):
        assert list(windows(chunks, window.start, batch)) == found[number:]
    requests = [request for window in found for lane in window.lanes(batch) for request in lane]
    assert sum(len(request.records) for request in requests) == 200
    assert len({request.number for request in requests}) == len(requests)


def test_a_request_is_json_with_a_key_that_repeats(hook: Hook) -> None:
    hook.options |= {"method": "PUT", "headers": {"X-Tenant": "7"}, "key": None}
    assert hook.led().commit([hook.staged([Order(1, 'line\n"\\\r'), Order(2)])], 1, ORIGIN)
    first, second = hook.service.requests()
    assert first["body"] == {"id": 1, "customer": 'line\n"\\\r'}
    assert [first["key"], second["key"]] == [f"{hook.name}/{ORIGIN}/hook/1/0/{number}" for number in (0, 1)]
    assert (first["method"], first["path"]) == ("PUT", "/hook")
    assert {name: first["headers"][name] for name in ("Content-Type", "X-Tenant", "User-Agent")} == {
        "Content-Type": "application/json", "X-Tenant": "7", "User-Agent": "exactlyonce",
    }  # fmt: skip


def test_a_batch_is_an_array_of_records_of_one_lane(hook: Hook) -> None:
    hook.options["batch"] = 4
    orders = some(100)
    assert hook.led().commit([hook.staged(orders)], 1, ORIGIN)
    assert sorted(hook.ids()) == [order.id for order in orders]
    by_customer = [[order["id"] for order in hook.service.counted() if order["customer"] == f"c{n}"] for n in range(7)]
    assert all(ids == sorted(ids) for ids in by_customer)
    assert max(len(request["body"]) for request in hook.service.requests()) == 4


def test_requests_of_a_key_wait_for_each_other_and_others_do_not(hook: Hook) -> None:
    """While the first order of a customer has no answer, all orders of others are answered, and none of that one."""
    hook.service.behave(held=0)
    orders = [Order(id, f"c{id % 3}") for id in range(1, 31)]
    committable, leader = hook.staged(orders), hook.led()
    thread = threading.Thread(target=leader.commit, args=([committable], 1, ORIGIN))
    thread.start()
    until(lambda: len(hook.service.requests()) == 21)
    held = hook.service.requests()[0]["body"]["customer"]
    assert sum(request["body"]["customer"] == held for request in hook.service.requests()) == 1
    hook.service.release()
    thread.join()
    assert sorted(hook.ids()) == list(range(1, 31))
    assert hook.service.repeated() == 0


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_refused_record_is_a_dead_letter_with_status_and_answer(hook: Hook, status: int) -> None:
    hook.options["key"] = None
    hook.service.behave(status=status, text="no such customer\n" + "x" * 10_000, times=1)
    leader, committable = hook.led(), hook.staged(some(3))
    assert leader.commit([committable], 1, ORIGIN)
    assert not leader.commit([committable], 1, ORIGIN)
    assert hook.ids() == [2, 3]
    (letter,) = hook.letters()
    assert json.loads(letter.value or b"") == {"id": 1, "customer": "c1"}
    reason = Reason.of(letter.headers)
    assert reason is not None
    assert (reason.pipeline, reason.operator, reason.kind, reason.error) == (
        hook.name,
        "hook",
        "sink",
        f"HTTP {status}",
    )
    assert reason.message.startswith("no such customer\nxxx")
    assert reason.message.endswith(f"Idempotency-Key: {hook.name}/{ORIGIN}/hook/1/0/0")
    assert len(reason.message) < 1_300


def test_without_dead_letters_a_refused_record_stops_the_pipeline(hook: Hook) -> None:
    hook.keeps_letters = False
    hook.service.behave(modulus=2)
    leader, committable = hook.led(), hook.staged(some(3))
    with pytest.raises(RecordsRefused, match=r"refuses a record, .*422 no order 2 ") as refused:
        leader.commit([committable], 1, ORIGIN)
    assert refused.value.records == 1
    assert "on_error=DeadLetters" in refused.value.remedy
    hook.service.behave()
    assert hook.led(2).commit([committable], 2, ORIGIN)
    assert sorted(hook.ids()) == [1, 2, 3]


def test_too_many_refusals_stop_the_pipeline_before_any_letter(hook: Hook) -> None:
    hook.limits = DeadLetterLimits(share=0.4)
    hook.service.behave(modulus=2)
    leader, committable = hook.led(), hook.staged(some(10))
    refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreError, "refuses 5 of 10 records, and max_share=0.4")
    assert hook.letters() == []


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (401, "correct the secret"),
        (403, "grant it"),
        (404, "correct url="),
        (405, "method="),
        (418, "speaks of no rec"),
    ],
)
def test_a_wrong_configuration_is_waited_for_and_named(hook: Hook, status: int, text: str) -> None:
    hook.service.behave(status=status)
    leader, committable = hook.led(), hook.staged(some(3))
    refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreUnavailable, f"answers {status}.*{text}")
    assert hook.letters() == []
    hook.service.behave()
    assert leader.commit([committable], 1, ORIGIN)
    assert sorted(hook.ids()) == [1, 2, 3]


def test_a_redirect_is_not_followed(hook: Hook) -> None:
    hook.service.behave(status=307, headers={"Location": "http://127.0.0.1:1/other?token=1"})
    leader, committable = hook.led(), hook.staged(some(1))
    text = refusing(
        lambda: leader.commit([committable], 1, ORIGIN), StoreUnavailable, "redirects to http://127.0.0.1:1/o"
    )
    assert "token" not in text


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_respected(hook: Hook, status: int) -> None:
    """The service is not asked again before; the call waits if the service has answered others, else its caller."""
    hook.service.behave(status=status, headers={"Retry-After": "1"}, times=1)
    leader, committable = hook.led(), hook.staged(some(1))
    refusing(
        lambda: leader.commit([committable], 1, ORIGIN), StoreUnavailable, f"answers {status}, and wants to be left"
    )
    refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreUnavailable, "wants to be left alone")
    assert len(hook.service.requests()) == 1
    assert again(lambda: leader.commit([committable], 1, ORIGIN))
    busy, taken = hook.service.requests()
    assert taken["at"] - busy["at"] > 0.9
    assert busy["key"] == taken["key"]


@pytest.mark.parametrize("value", ["99999999999999999999 Oct 2026 07:28:30 GMT", "soon", "-1"])
def test_a_pause_that_cannot_be_read_is_none(hook: Hook, value: str) -> None:
    hook.service.behave(status=503, headers={"Retry-After": value}, times=1)
    leader, committable = hook.led(), hook.staged(some(1))
    text = refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreUnready, "answers 503")
    assert "left alone" not in text
    assert again(lambda: leader.commit([committable], 1, ORIGIN))


def test_a_huge_pause_is_an_hour(hook: Hook) -> None:
    hook.service.behave(status=503, text="late", headers={"Retry-After": "9" * 30})
    leader, committable = hook.led(), hook.staged(some(1))
    refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreUnready, "left alone for 3600 s")
    refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreUnready, "has answered 503 late, and wants .* more")


def test_requests_of_other_keys_go_on_after_a_busy_answer(hook: Hook) -> None:
    """The first request gets 503 without Retry-After: what follows in its lane waits, and all others are answered."""
    hook.options["in_flight"] = 2
    hook.service.behave(status=503, times=1)
    leader, committable = hook.led(), hook.staged(some(28))
    assert leader.commit([committable], 1, ORIGIN)
    requests = hook.service.requests()
    (again_at,) = (place for place, request in enumerate(requests[1:], 1) if request["key"] == requests[0]["key"])
    customers = [request["body"]["customer"] for request in requests[1:again_at]]
    lane = StagedRows(JsonCodec(Order), customer)

    def lane_of(name: str) -> bytes:
        return lane.encode([Order(0, name)])[0].partition(b" ")[0]

    mine = lane_of(requests[0]["body"]["customer"])
    assert all(lane_of(name) != mine for name in customers)
    assert len(customers) == sum(lane_of(order.customer) != mine for order in some(28))


def test_a_service_that_is_busy_for_all_gets_few_requests(hook: Hook) -> None:
    hook.options["in_flight"] = 1
    hook.service.behave(status=503)
    leader, committable = hook.led(), hook.staged(some(28))
    refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreUnready, "answers 503")
    assert len(hook.service.requests()) == 1


def test_the_last_failure_is_named_while_others_are_answered(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader shows it with the time that the call takes."""
    hook.service.behave(status=503, text="crowded", times=1)
    leader, committable = cast(Any, hook.led()), hook.staged(some(28))
    failures: list[str] = []
    monkeypatch.setattr(leader._pause, "wait", lambda seconds: failures.append(leader.failure))
    assert leader.commit([committable], 1, ORIGIN)
    assert failures == [f"The service at {hook.service.url} answers 503 crowded."]
    assert leader.failure == ""


def test_a_busy_service_gets_no_answered_request_again(hook: Hook) -> None:
    hook.options |= {"key": None}
    orders, committable = some(20), hook.staged(some(20))
    leader = hook.led()
    hook.service.behave(status=503, times=1)
    with suppress(StoreUnavailable):
        leader.commit([committable], 1, ORIGIN)
    for _ in range(3):
        hook.service.behave(status=503, times=1)
        with suppress(StoreUnavailable):
            leader.commit([committable], 1, ORIGIN)
    again(lambda: leader.commit([committable], 1, ORIGIN))
    taken = [request["body"]["id"] for request in hook.service.requests() if request["status"] == 200]
    assert taken == [order.id for order in orders]


def test_a_slow_answer_is_an_outage_and_its_request_comes_again(hook: Hook) -> None:
    hook.options["timeout"] = "300ms"
    hook.service.behave(delay_s=1.0)
    leader, committable = hook.led(), hook.staged(some(1))
    refusing(lambda: leader.commit([committable], 1, ORIGIN), StoreUnavailable, r"has not answered for 0\.3 s")
    hook.service.behave()
    assert again(lambda: leader.commit([committable], 1, ORIGIN))
    assert hook.ids() == [1]
    assert hook.service.repeated() >= 1


def test_a_connection_that_the_service_has_closed_is_not_used_again(hook: Hook) -> None:
    leader = hook.led()
    assert leader.commit([hook.staged(some(3))], 1, ORIGIN)
    hook.service.kill()
    hook.service.start()
    assert leader.commit([hook.staged(some(3, 4), 2)], 1, ORIGIN)
    assert hook.service.repeated() == 0
    hook.service.kill()
    text = refusing(
        lambda: leader.commit([hook.staged(some(3, 7), 3)], 1, ORIGIN), StoreUnavailable, "cannot be reached: .*refused"
    )
    assert hook.service.url in text


def test_a_service_needs_a_certificate_that_is_trusted(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path, "service")
    hook.service.kill()
    hook.service = Service(tmp_path / "tls", str(tmp_path / "service.both"))
    try:
        refusing(hook.committer().check, StoreUnavailable, "certificate is not trusted: .*SSL_CERT_FILE")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "service.pem"))
        assert hook.led().commit([hook.staged(some(3))], 1, ORIGIN)
        assert sorted(hook.ids()) == [1, 2, 3]
    finally:
        hook.service.kill()


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_a_crash_repeats_a_window_at_most_and_letters_come_once(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place where a leader can die with answers that the ledger does not have, before and after a window."""
    monkeypatch.setattr("exactlyonce.sinks.http.requests.WINDOW_REQUESTS", 10)
    hook.service.behave(modulus=9)
    committable = hook.staged(some(45))
    for incarnation, place in enumerate((1, 3, 2, 0), 1):
        left = place

        def die(name: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise FailpointRaised(name)

        monkeypatch.setattr(module, "hit", die)
        leader = hook.led(incarnation)
        if place:
            with pytest.raises(FailpointRaised):
                leader.commit([committable], incarnation, ORIGIN)
        else:
            assert leader.commit([committable], incarnation, ORIGIN)
    assert 0 < hook.service.repeated() <= 30
    refused = [id for id in range(1, 46) if id % 9 == 0]
    assert sorted(hook.ids()) == [id for id in range(1, 46) if id % 9]
    assert [json.loads(letter.value or b"")["id"] for letter in hook.letters()] == refused
    assert hook.committer().fence(5, ORIGIN) == {0: 1}


def test_a_zombie_that_sends_disturbs_neither_counts_nor_order(hook: Hook) -> None:
    """A leader is held up in the middle of its requests; the next one sends all, and the next checkpoint; then the
    zombie goes on sending what it had begun, by the same keys, and is fenced before it writes anything."""
    hook.options["key"] = None
    hook.service.behave(modulus=10, held=5)
    first, zombie = hook.staged(some(20)), hook.led(1)
    outcome: list[BaseException] = []

    def send() -> None:
        try:
            again(lambda: zombie.commit([first], 1, ORIGIN))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: len(hook.service.requests()) == 6)
    leader = hook.led(2)
    assert leader.commit([first], 2, ORIGIN)
    assert leader.commit([hook.staged(some(20, 21), 2)], 2, ORIGIN)
    hook.service.release()
    thread.join()
    assert [type(error) for error in outcome] == [Fenced]
    assert hook.service.repeated() == 20, "the zombie has sent all that it had begun"
    assert hook.ids() == [id for id in range(1, 41) if id % 10]
    assert [json.loads(letter.value or b"")["id"] for letter in hook.letters()] == [10, 20, 30, 40]
    assert hook.committer().fence(3, ORIGIN) == {0: 2}


def test_a_newer_leader_that_a_zombie_interrupts_goes_on(hook: Hook) -> None:
    """The zombie ends the open transaction of the newer one, sees that it is fenced, and the newer one repeats it."""
    leader = hook.led(2)
    zombie = hook.committer()
    with pytest.raises(Fenced):
        zombie.commit([hook.staged(some(2))], 1, ORIGIN)
    cast(Any, zombie)._log._initialise()
    committable = hook.staged(some(3))
    with suppress(StoreUnavailable):
        leader.commit([committable], 2, ORIGIN)
    again(lambda: leader.commit([committable], 2, ORIGIN))
    assert sorted(hook.ids()) == [1, 2, 3]


# --- descriptions and secrets ----------------------------------------------------------------------------------------


def test_secrets_are_in_no_error_and_no_letter(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the service sends them back."""
    monkeypatch.setenv("HOOK_TOKEN", f"Bearer {TOKEN}")
    hook.options["headers"] = {"Authorization": "env:HOOK_TOKEN"}
    hook.service.behave(modulus=2)
    assert hook.led().commit([hook.staged(some(4))], 1, ORIGIN)
    assert hook.service.requests()[0]["headers"]["Authorization"] == f"Bearer {TOKEN}"
    letters = hook.letters()
    assert len(letters) == 2
    assert TOKEN not in repr(letters)
    assert "***" in repr(letters)
    hook.service.behave(status=500, text=f"you sent Bearer {TOKEN}")
    text = refusing(
        lambda: hook.led(2).commit([hook.staged(some(4), 2)], 2, ORIGIN),
        StoreUnavailable,
        r"answers 500 you sent \*\*\*",
    )
    assert TOKEN not in text


def test_a_secret_that_is_missing_or_no_header_is_named(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.options["headers"] = {"Authorization": "env:HOOK_TOKEN"}
    monkeypatch.delenv("HOOK_TOKEN", raising=False)
    refusing(hook.committer().check, ConfigError, "no variable HOOK_TOKEN")
    monkeypatch.setenv("HOOK_TOKEN", f"{TOKEN}\nX: 1")
    assert TOKEN not in refusing(hook.committer().check, ConfigError, "Authorization=env:HOOK_TOKEN.*line break")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "ftp://a/b"}, "neither http:// nor https://"),
        ({"url": "https://ann:pw@host/b"}, "a login"),
        ({"url": "https://host:x/"}, "a port that is none"),
        ({"headers": {"Authorization": "Bearer a"}}, "written out"),
        ({"headers": {"X-Api-Key": "env:"}}, "names no variable"),
        ({"headers": {"Idempotency-Key": "1"}}, "sets itself"),
        ({"headers": {"X": "a\nb"}}, "line break"),
        ({"headers": 7}, "must be a dict"),
        ({"key": "customer"}, "must be a function"),
        ({"method": "GET"}, "one of POST"),
        ({"batch": 0}, "1 or more"),
        ({"in_flight": 65}, "from 1 to 64"),
        ({"timeout": "0s"}, "above 0"),
    ],
)
def test_mistakes_are_named_before_a_run(options: dict[str, Any], problem: str) -> None:
    described = {"url": "https://hooks.example/orders", **options}
    (found,) = HttpSink[Order](described.pop("url"), **described).problems(Order)
    assert problem in found
    assert "pw" not in found


def test_changes_are_no_records_to_send() -> None:
    (found,) = HttpSink[Any]("https://hooks.example/orders").problems(Change[Order])
    assert "map it to a value" in found


def test_lanes_are_the_same_in_each_process() -> None:
    """A constant here is part of the requests that wait."""
    rows = StagedRows(JsonCodec(Order), customer).encode([Order(1, "ann"), Order(2, "bob")])
    assert rows == [b'56 {"id":1,"customer":"ann"}\n', b'45 {"id":2,"customer":"bob"}\n']
    assert LANES == 64
    assert [lane[0].number for lane in Window(0, [b"1 a", b"2 b", b"1 c"]).lanes(1)] == [0, 1]
