"""The settings of the producers of a sink."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from exactlyonce.sinks.kafka import producers
from exactlyonce.sinks.kafka.producers import TRANSACTION_LINGER_MS, KafkaProducers


def test_records_of_a_transaction_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees them before their checkpoint completes; a user's setting counts more, by either of its names, and
    without a transaction the library's own default does."""
    made: list[dict[str, Any]] = []

    def make(settings: dict[str, Any]) -> Any:
        made.append(settings)
        return SimpleNamespace(init_transactions=lambda timeout_s: None, begin_transaction=lambda: None)

    def failed(reason: str, kind: Any = None) -> None:
        raise AssertionError(reason)

    monkeypatch.setattr(producers, "make_producer", make)
    monkeypatch.setattr(producers, "connect", lambda *arguments: None)
    with ThreadPoolExecutor(1) as executor:
        for transactional_id, settings in (("t", {}), ("t", {"linger.ms": "3"}), (None, {})):
            KafkaProducers("topic", settings, 60_000, executor).make(transactional_id, failed).result()
        KafkaProducers("topic", {"queue.buffering.max.ms": "3"}, 60_000, executor).make("t", failed).result()
    assert [each.get("linger.ms") for each in made[:3]] == [TRANSACTION_LINGER_MS, "3", None]
    assert list(made[3]).index("linger.ms") < list(made[3]).index("queue.buffering.max.ms"), (
        "of two names the last counts"
    )
