"""The answers that a decision log gives to those who have asked its run for something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, Manifest, TopicInfo
from exactlyonce.cli.text import to_stderr
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import Asked
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines import run_requests
from exactlyonce.engines.run_requests import NotAnswered, cancelled_since, ended_behind
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable
from tests.cli.conftest import manifest

ENDED = Incarnation(incarnation=3, host="box", process=1, started_at_ms=0, heartbeat_ms=1_000, ended=True)
SAVEPOINT = manifest(checkpoint=41, incarnation=3, kind="savepoint", base=40, previous=40, requests=("another",))


def history(incarnation: Incarnation, *manifests: Manifest, finalized: bool = True) -> History:
    found = History("p")
    found.admit(incarnation)
    for each in manifests:
        found.admit(each)
        if finalized:
            found.admit(Finalized(each.checkpoint, each.incarnation, 0, ()))
    return found


def test_a_run_that_has_ended_behind_a_savepoint() -> None:
    """A request for savepoint and end is answered by another's savepoint, also after a run that has decided nothing."""
    found = history(ENDED, SAVEPOINT)
    assert ended_behind(found, 3) == ended_behind(found, 2) == SAVEPOINT
    assert ended_behind(found, 4) is None
    found.admit(msgspec.structs.replace(ENDED, incarnation=4, ended=False))
    assert ended_behind(found, 3) == SAVEPOINT


@pytest.mark.parametrize(
    "found",
    [
        history(msgspec.structs.replace(ENDED, ended=False), SAVEPOINT),
        history(msgspec.structs.replace(ENDED, cancelled="request"), SAVEPOINT),
        history(ENDED, SAVEPOINT, finalized=False),
        history(ENDED, msgspec.structs.replace(SAVEPOINT, kind="final")),
        history(ENDED, SAVEPOINT, msgspec.structs.replace(SAVEPOINT, checkpoint=42, previous=41, kind="final")),
        history(msgspec.structs.replace(ENDED, incarnation=4), SAVEPOINT),
        history(ENDED),
    ],
    ids=["goes on", "cancelled", "not finalized", "no savepoint", "more since", "another one's", "nothing"],
)
def test_an_end_that_is_none_behind_a_savepoint(found: History) -> None:
    assert ended_behind(found, 3) is None


def test_a_newer_decision_that_cannot_be_read() -> None:
    found = history(ENDED, SAVEPOINT)
    found.checkpoint_latest = 42
    assert ended_behind(found, 3) is None


def test_a_run_that_was_cancelled() -> None:
    found = history(msgspec.structs.replace(ENDED, cancelled="another"), SAVEPOINT)
    assert cancelled_since(found, 3)
    assert not cancelled_since(found, 4)
    assert not cancelled_since(history(ENDED, SAVEPOINT), 3)


class _Deaf:
    """The mailbox of a run that does nothing; *raising*, once a request is in it."""

    raising: BaseException | None = None

    def __init__(self, *args: Any) -> None: ...

    def look(self) -> None: ...

    def ask(self, asked: Asked) -> None:
        if self.raising is not None:
            raise self.raising

    def close(self) -> None: ...


TOPIC = TopicInfo("p.checkpoints", "id", 2, 1)
CONFIG, LIVING = ClientConfig({"bootstrap.servers": "h:1"}), msgspec.structs.replace(ENDED, ended=False)
PENDING: dict[str, tuple[Callable[[], object], str]] = {
    "savepoint": (
        lambda: run_requests.savepoint(CONFIG, "p", LIVING, 0, stop=False, note=to_stderr),
        "p was asked for a savepoint, and may still take it. `exactlyonce savepoints list p` shows whether it has; a "
        "savepoint is kept until `exactlyonce savepoints delete p N`.",
    ),
    "stop": (
        lambda: run_requests.savepoint(CONFIG, "p", LIVING, 0, stop=True, note=to_stderr),
        "may still take it, and end behind it.",
    ),
    "cancel": (
        lambda: run_requests.cancel(CONFIG, TOPIC, history(LIVING, SAVEPOINT), LIVING, 0, to_stderr),
        "was asked to end as cancelled",
    ),
    "delete": (
        lambda: run_requests.delete(CONFIG, "p", 41, 0, to_stderr),
        "p was asked to delete savepoint 41, and may still do so: `exactlyonce savepoints list p` shows whether",
    ),
}


@pytest.mark.parametrize("action", PENDING)
@pytest.mark.parametrize("how", [None, KeyboardInterrupt(), BrokerUnavailable("it is away")], ids=repr)
def test_who_waits_no_longer(
    action: str, how: BaseException | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run may have seen the request: the message says what it may still do, and how to see that."""
    monkeypatch.setattr(run_requests, "Mailbox", type("_", (_Deaf,), {"raising": how}))
    monkeypatch.setattr(run_requests, "read_history", lambda *args: history(LIVING, SAVEPOINT))
    monkeypatch.setattr(run_requests, "living_run", lambda found: LIVING)
    monkeypatch.setattr(run_requests, "find_topic", lambda *args: TOPIC)
    call, said = PENDING[action]
    with pytest.raises(NotAnswered if how is None else type(how)) as raised:
        call()
    assert said in (str(raised.value) if how is None else capsys.readouterr().err)


def test_a_silent_run_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a heartbeat it may be restarting; only one that has said that it ended is over. Each is told once."""
    monkeypatch.setattr(run_requests, "Mailbox", _Deaf)
    monkeypatch.setattr(run_requests, "POLL_S", 0.001)
    monkeypatch.setattr(run_requests, "QUIET_MS", 0)
    beating = msgspec.structs.replace(LIVING, heartbeat_ms=SystemClock().now_ms())
    for newest, said, noted in (
        (beating, "Process 1 on box has not done", "Waiting for process 1 on box: its last heartbeat was "),
        (LIVING, "The run, which is silent, has not done", "process 1 on box, has written no heartbeat for 30 s. If"),
        (ENDED, "The run of p has ended", ""),
    ):
        monkeypatch.setattr(run_requests, "read_history", lambda *args, newest=newest: history(newest, SAVEPOINT))
        notes: list[str] = []
        with pytest.raises(NotAnswered, match=said):
            run_requests.delete(CONFIG, "p", 41, 50, notes.append)
        assert [noted in note for note in notes] == [True] * bool(noted)
