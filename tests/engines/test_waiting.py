"""A broker that is away is waited for at the end of a decision, and that is said; what takes long is no silence."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from exactlyonce.checkpoint.requests import (
    CopyTransaction,
    DescribeProducers,
    EndAnswer,
    Ending,
    EndTransactions,
    ReplayTransaction,
    Request,
    answered,
)
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.connections import Performer
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.cluster import LIMIT_S


class Away:
    def end_all(self, endings: Any, *, commit: bool) -> Any:
        raise BrokerUnavailable("127.0.0.1:9092 does not answer")

    def producers(self, partitions: Any) -> Any:
        raise BrokerUnavailable("127.0.0.1:9092 does not answer")


def test_what_is_waited_for_is_said_once_in_a_while() -> None:
    notes: list[str] = []
    nobody: Any = Away()
    nothing: Any = None
    performer = Performer(
        ClientConfig({"bootstrap.servers": "127.0.0.1:9092"}), nobody, nothing, nothing, 1_000, note=notes.append
    )
    assert performer(EndTransactions((Ending("a", 1, 0),), commit=True)) == [EndAnswer.BUSY]
    assert isinstance(answered(DescribeProducers((("t", 0),)), performer).error, BrokerUnavailable)
    assert notes == ["waiting for a broker: 127.0.0.1:9092 does not answer"]
    performer.close()


NOTHING: Any = None


@pytest.mark.parametrize("request_", [CopyTransaction(NOTHING, "a"), ReplayTransaction(NOTHING, NOTHING, "a")])
def test_heartbeats_go_on_while_something_is_written_again(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair that takes minutes, by copy or replay, leaves the coordinator alive to readers of the log."""
    beaten = threading.Semaphore(0)

    def slow(*arguments: Any) -> str:
        assert all(beaten.acquire(timeout=LIMIT_S) for _ in range(3)), "heartbeats come meanwhile"
        return "done"

    monkeypatch.setattr("exactlyonce.engines.connections.UPKEEP_INTERVAL_S", 0.001)
    monkeypatch.setattr("exactlyonce.engines.connections.copy_transaction", slow)
    config = ClientConfig({"bootstrap.servers": "127.0.0.1:9092"})
    performer = Performer(
        config, NOTHING, NOTHING, NOTHING, 1_000, lambda *_: None, replay=slow, beat=beaten.release
    )  # fmt: skip
    assert performer(request_) == "done"
    performer.close()
