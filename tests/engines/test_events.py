"""Events: what the last one of a command says."""

from __future__ import annotations

import pickle

import pytest

from exactlyonce.checkpoint.decision_log import fenced
from exactlyonce.checkpoint.records.manifest import Incarnation
from exactlyonce.engines.bounded.submit import perform, settled
from exactlyonce.engines.events import ending
from exactlyonce.pipeline.errors import ExactlyOnceError, Halt, RecordError

NEWEST = Incarnation(incarnation=3, host="h2", process=7, started_at_ms=0, heartbeat_ms=0)


def test_a_halt_has_its_choices() -> None:
    text = "Input is gone.\n  Choices: (1) restore it; (2) go on without `p`; or (3) `exactlyonce reset p`.\n  No more."
    told = ending(Halt(text, topic="orders", partition=2), "p", lambda said: said.replace("orders", "***"))
    assert told["choices"] == ["restore it", "go on without `p`", "`exactlyonce reset p`"]
    assert (told["event"], told["code"], told["topic"], told["partition"]) == ("failed", 6, "***", 2)
    assert "choices" not in ending(Halt("Run it again."), "p", str)


def test_a_takeover_says_by_whom() -> None:
    told = ending(fenced("p", 2, NEWEST), "p", str)
    assert (told["event"], told["by_incarnation"], told["by_host"], told["by_process"]) == ("taken_over", 3, "h2", 7)
    assert "by_host" not in ending(fenced("p", 3, NEWEST), "p", str), "who begins is not in the log yet"


@pytest.mark.parametrize("error", [RecordError("bad", operator="in", offset=3), RecordError("bad")])
def test_facts_survive_pickling(error: ExactlyOnceError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.facts) == ("bad", error.facts)


def test_facts_come_back_from_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a unit fails with in another process is raised by the driver with all that it is about."""

    def failing(work: bytes, label: str) -> bytes:
        raise RecordError("bad", topic="orders", partition=1, offset=7)

    monkeypatch.setattr("exactlyonce.engines.bounded.submit._KINDS", {"unit": failing})
    with pytest.raises(RecordError) as raised:
        settled([perform(b"\x81\xa4type\xa4unit", "inline-1-0")])
    assert raised.value.facts == {"topic": "orders", "partition": 1, "offset": 7}
