"""`exactlyonce cancel`: a run ends without another checkpoint, and the next one goes on from the newest."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.requests import drive
from exactlyonce.checkpoint.store.log_reader import read_history, read_topic
from exactlyonce.checkpoint.store.mailbox import Mailbox
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.cli import asking
from exactlyonce.cli.leading import leading
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.erasing import erase
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Command

if TYPE_CHECKING:
    from tests.cli.conftest import Here, Orders

pytestmark = pytest.mark.broker


def history(orders: Orders) -> History:
    """What is decided."""
    return read_history({"bootstrap.servers": orders.kafka.bootstrap_servers}, orders.name)


def checkpoint_topic_id(orders: Orders) -> str:
    """The id of the checkpoint topic."""
    return find_topic({"bootstrap.servers": orders.kafka.bootstrap_servers}, orders.name).topic_id


def transaction_states(orders: Orders) -> set[str]:
    """Of the sinks of all incarnations."""
    transactions = Transactions(ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers}))
    try:
        listed = transactions.list(f"eo:{orders.name}:out:")
    finally:
        transactions.close()
    return {each.state for each in listed}


@pytest.mark.exhaustive
def test_what_was_not_decided_is_forgotten(orders: Orders) -> None:
    """A run that is cancelled in its first interval leaves nothing visible, nothing open, and no other checkpoint than
    the one that it began with; its end is clean, and the next run reads and writes all of it."""
    process = orders.command.start("run", "orders:pipeline", "--checkpoint-interval", "10m", "--json")
    try:
        deadline = time.monotonic() + LIMIT_S
        while "Ongoing" not in transaction_states(orders):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)  # another process has no event to wait for
        cancelled = orders.command("cancel", orders.name, "--json")
        assert cancelled.code == 0, cancelled.err
        assert json.loads(cancelled.out) == {"pipeline": orders.name, "checkpoints": [0], "deleted": False}
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "cancelled, as asked for" in said
    assert "Ongoing" not in transaction_states(orders)
    assert orders.totals() == []
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 700
    assert history(orders).incarnations[2].ended


def test_checkpoints_are_kept(orders: Orders) -> None:
    """Those that completed stay, what they have made visible too, and the next run goes on from the newest."""
    with orders.running() as process:
        cancelled = orders.command("cancel", "orders:pipeline")
        assert cancelled.code == 0, cancelled.err
        assert process.wait(LIMIT_S) == 0
    found = history(orders)
    assert found.latest is not None
    assert found.unfinalized is None
    assert found.latest.kind == "checkpoint"
    assert f"{found.latest.checkpoint})" in cancelled.out
    orders.write(70)
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 770
    assert max(map(int, filter(None, orders.totals()))) == 110


DELETING = ("--retention", "delete_on_cancellation")


def test_checkpoints_are_deleted_where_the_run_says_so(orders: Orders) -> None:
    """The next run begins anew, and writes all again beside what is visible."""
    with orders.running(*DELETING) as process:
        first = checkpoint_topic_id(orders)
        cancelled = orders.command("cancel", orders.name, "--json")
        assert cancelled.code == 0, cancelled.err
        assert process.wait(LIMIT_S) == 0
    assert json.loads(cancelled.out) == {"pipeline": orders.name, "checkpoints": [], "deleted": True}
    assert checkpoint_topic_id(orders) != first
    left = history(orders)
    assert (left.retained, left.incarnation_latest, left.condemned) == ([], 2, False)
    visible = len(orders.totals())
    again = orders.command("run", "orders:pipeline", "--until", "latest")
    assert again.code == 0, again.err
    assert len(orders.totals()) == visible + 700


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [(), DELETING], ids=["kept", "deleted"])
def test_two_who_cancel(orders: Orders, tmp_path: Path, options: tuple[str, ...]) -> None:
    """One whose request the run has not seen has cancelled it as well, also if the other has begun to delete all that
    says so: it waits until that is over."""
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    fired = tmp_path / "fired"
    fired.mkdir()
    armed = {"EXACTLYONCE_FAILPOINTS": "erasing-topic=stop", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
    first = Command(orders.command.folder, {**orders.command.environment, **armed})
    with orders.running(*options) as process, ThreadPoolExecutor(1) as other:
        topic, seen = read_topic(config.confluent(), orders.name)  # as the other one has seen it, too
        living = asking.living_run(seen)
        assert living is not None
        cancelling = first.start("cancel", orders.name, "--json")
        assert process.wait(LIMIT_S) == 0
        deadline = time.monotonic() + LIMIT_S
        while options and not (fired / "erasing-topic").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)  # a file of another process has no event to wait for
        found = other.submit(asking.cancel, config, topic, seen, living, LIMIT_S * 1000)
        if options:
            with pytest.raises(TimeoutError):
                found.result(5)
            cancelling.send_signal(signal.SIGCONT)
        out, err = cancelling.communicate(timeout=LIMIT_S)
        assert cancelling.returncode == 0, err
        assert json.loads(out)["deleted"] == bool(options)
        assert (found.result(LIMIT_S).latest is None) == bool(options)


def condemned(orders: Orders) -> tuple[ClientConfig, TopicInfo, History]:
    """A run was cancelled, and nobody has begun to delete its checkpoints."""
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    with orders.running(*DELETING) as process:
        topic, seen = read_topic(config.confluent(), orders.name)
        living = asking.living_run(seen)
        assert living is not None
        found = asking.cancel(config, topic, seen, living, LIMIT_S * 1000)
        assert process.wait(LIMIT_S) == 0
    assert found.condemned
    return config, topic, found


def test_a_run_that_begins_while_all_is_deleted(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left in peace by whoever has made the new topic, and sleeps before it is to begin there."""
    config, topic, found = condemned(orders)
    begun: list[Callable[[], Outcome]] = []

    def slow(*arguments: Any) -> DecisionLog:
        begun.append(orders.begun_elsewhere())
        return DecisionLog(*arguments)

    monkeypatch.setattr(erase, "DecisionLog", slow)
    erase.erase_condemned(config, topic, found, print)
    assert begun[0]() is Outcome.DONE, "it was not fenced"


def test_two_who_delete(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one finds the topic gone, or made anew, and all as it was asked for."""
    config, topic, found = condemned(orders)
    faster = ["erasing-blocks", "erasing-topic"]

    def meanwhile(place: str) -> None:
        if place in faster:
            faster.remove(place)
            erase.erase_condemned(config, topic, found, print)

    monkeypatch.setattr(erase, "hit", meanwhile)
    erase.erase_condemned(config, topic, found, print)
    left = history(orders)
    assert (faster, left.retained, left.incarnation_latest) == ([], [], 2)


def test_a_life_that_has_begun_since(orders: Orders, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who cancels with another is answered by the end of the run that was meant: what it says is of that one, and
    the next is asked for nothing."""
    cancel = asking.cancel
    begun: list[Callable[[], Outcome]] = []

    def slow(*arguments: Any) -> History:
        assert orders.command("cancel", orders.name).code == 0
        assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
        begun.append(orders.begun_elsewhere())
        return cancel(*arguments)

    with orders.running(*DELETING) as process:
        monkeypatch.setattr(asking, "cancel", slow)
        cancelled = here("cancel", orders.name)
        assert process.wait(LIMIT_S) == 0
    assert (cancelled.code, "Its checkpoints are deleted" in cancelled.out) == (0, True), cancelled
    assert begun[0]() is Outcome.DONE, "it goes on"
    assert history(orders).retained


@pytest.mark.exhaustive
def test_a_savepoint_keeps_all(orders: Orders) -> None:
    """Nothing is deleted while one is kept: it lies where the checkpoints do."""
    with orders.running(*DELETING) as process:
        taken = orders.command("savepoint", orders.name, "--json")
        assert taken.code == 0, taken.err
        number = json.loads(taken.out)["checkpoint"]
        cancelled = orders.command("cancel", orders.name)
        assert cancelled.code == 0, cancelled.err
        assert process.wait(LIMIT_S) == 0
    assert f"with the savepoints {number}" in " ".join(cancelled.out.split())
    assert number in history(orders).manifests
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 700


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("finisher", ["run", "cancel", "reset"])
@pytest.mark.parametrize("place", ["erasing-blocks", "erasing-topic"])
def test_a_kill_in_the_middle_of_the_deletion(orders: Orders, tmp_path: Path, place: str, finisher: str) -> None:
    """Whoever comes next finishes it, and the next run begins anew; where the topic is gone, it knows that by a
    transactional id."""
    (tmp_path / "fired").mkdir()
    armed = {"EXACTLYONCE_FAILPOINTS": f"{place}=kill", "EXACTLYONCE_FAILPOINTS_FIRED": str(tmp_path / "fired")}
    storage = ("--checkpoint-storage", (tmp_path / "blocks").as_uri())
    (tmp_path / "blocks").mkdir()
    with orders.running(*DELETING, *storage) as process:
        assert any(each.is_file() for each in (tmp_path / "blocks").rglob("*"))
        killed = orders.command("cancel", orders.name, **armed)
        assert killed.code == -9, killed
        assert process.wait(LIMIT_S) == 0
    assert not any(each.is_file() for each in (tmp_path / "blocks").rglob("*"))
    visible, gone = len(orders.totals()), place == "erasing-topic"
    if finisher == "cancel":
        again = orders.command("cancel", orders.name)
        assert (again.code, "has no checkpoints" in " ".join(again.err.split())) == ((2, True) if gone else (0, False))
    elif finisher == "reset":
        assert orders.command("reset", orders.name, "--yes").code == 0
    again = orders.command("run", "orders:pipeline", "--until", "latest", *storage)
    assert again.code == 0, again.err
    assert len(orders.totals()) == visible + 700
    newest = history(orders).newest_incarnation
    assert newest is not None
    assert newest.incarnation > 1


def test_a_bounded_command_takes_no_requests(orders: Orders) -> None:
    """It is refused at once, with who is at work and what ends it, and so is a savepoint; so is a run that is gone."""
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    with leading(config, orders.name, None, print) as (leader, perform, _):
        drive(leader.log.open(), perform)
        drive(leader.log.begin("other-host", 17, bounded=True), perform)
        for command in ("cancel", "savepoint"):
            refused = orders.command(command, orders.name)
            assert refused.code == 2, refused
            assert "process 17 on other-host, a bounded command, which takes no" in " ".join(refused.err.split())


def test_a_run_that_does_not_answer(orders: Orders) -> None:
    """Whoever asked is told so after the time that was allowed; nothing is changed."""
    process = orders.stopped_at("coordinator-triggered")
    process.kill()
    process.communicate(timeout=LIMIT_S)
    asked = orders.command("cancel", orders.name, "--timeout", "1s")
    assert (asked.code, "has not done within 1.0 s" in " ".join(asked.err.split())) == (1, True), asked


@pytest.fixture
def _can_be_interrupted() -> Iterator[None]:
    """Processes that are begun, also where a shell has put this one into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_can_be_interrupted")
def test_a_command_that_is_interrupted(orders: Orders) -> None:
    """It says what it has asked for, and that the run may still do it."""
    process = orders.stopped_at("coordinator-triggered")
    mailbox = Mailbox({"bootstrap.servers": orders.kafka.bootstrap_servers}, orders.name)
    try:
        cancelling = orders.command.start("cancel", orders.name)
        deadline = time.monotonic() + LIMIT_S
        while mailbox.look() is None:
            assert cancelling.poll() is None, cancelling.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)  # another process has no event to wait for
        cancelling.send_signal(signal.SIGINT)
        _, said = cancelling.communicate(timeout=LIMIT_S)
        assert mailbox.look() is None, "it is taken back"
    finally:
        mailbox.close()
        process.kill()
        process.communicate(timeout=LIMIT_S)
    assert (cancelling.returncode, "was asked to end as cancelled" in said) == (130, True), said
    assert "may still do so" in said


def test_what_the_next_run_halts_for(orders: Orders, tmp_path: Path) -> None:
    """Where a store has a ledger, that is said, as a reset says it; what is said is so."""
    module = orders.command.folder / "orders.py"
    sink = f'FileSink("{tmp_path / "out"}", format="jsonl")'
    text = (
        module.read_text()
        .replace("tuple[int, int]", "tuple[int, Order]")
        .replace("return total, total", "return total, order")
    )
    module.write_text(
        text.replace("import KafkaSink", "import FileSink").replace(f'KafkaSink("{orders.name}-totals")', sink)
    )
    with orders.running(*DELETING) as process:
        cancelled = orders.command("cancel", orders.name)
        assert cancelled.code == 0, cancelled.err
        assert process.wait(LIMIT_S) == 0
    assert "what out wrote stays, and its ledger: it halts until both are emptied" in cancelled.out
    halted = orders.command("run", "orders:pipeline", "--until", "latest")
    assert (halted.code, "ledger" in halted.err) == (6, True), halted


def test_where_there_is_nothing_to_cancel(orders: Orders) -> None:
    """A pipeline that nobody knows, and one that does not run, are refused with what to do, and nothing is changed."""
    unknown = orders.command("cancel", orders.name)
    assert (unknown.code, "has no checkpoints" in " ".join(unknown.err.split())) == (2, True), unknown
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    before = history(orders).incarnations
    over = orders.command("cancel", orders.name)
    assert (over.code, "does not run" in " ".join(over.err.split())) == (2, True), over
    assert history(orders).incarnations == before
