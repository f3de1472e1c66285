"""Appends during which the broker goes away: the outcome is unknown once the commit was requested, and not before.

A proxy between the log and its broker loses a certain request, or its answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kafka_proxy import END_TXN, PRODUCE, Fate, Fault, KafkaProxy, proxy_before

from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.pipeline.errors import BrokerUnavailable

HASTY_MS = 10_000
"""The timeout of an append that is to fail: time enough to come to the request that gets lost, on any machine."""


@pytest.fixture(scope="module")
def proxied(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProxy]:
    with proxy_before(kafka, tmp_path_factory.mktemp("broker")) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxied: KafkaProxy) -> KafkaProxy:
    proxied.heal()
    return proxied


@pytest.fixture
def store(new_store: Any, topic_name: str, proxy: KafkaProxy) -> Any:
    return new_store(proxy.bootstrap_servers, topic_name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fate", [Fate.REQUEST_LOST, Fate.ANSWER_LOST], ids=lambda fate: fate.name)
def test_a_commit_without_an_answer(store: Any, proxy: KafkaProxy, fate: Fate) -> None:
    log = store.living(append_timeout_ms=HASTY_MS)
    fault = proxy.arm(Fault(END_TXN, fate, dark=True))
    assert log.appended(store.manifest(0)) is Outcome.UNKNOWN
    assert fault.met.is_set()
    assert log.history.manifests == {}
    with pytest.raises(BrokerUnavailable, match="the next one reads what is true"):
        log.appended(store.manifest(0))
    log.close()
    proxy.heal()
    assert list(store.opened().history.manifests) == ([0] if fate is Fate.ANSWER_LOST else [])


@pytest.mark.exhaustive
def test_records_without_an_answer(store: Any, proxy: KafkaProxy) -> None:
    """Their commit was never asked for. The same log goes on once the broker has confirmed that it took them back."""
    log = store.living(append_timeout_ms=HASTY_MS)
    fault = proxy.arm(Fault(PRODUCE, Fate.ANSWER_LOST, dark=True))
    assert log.appended(store.manifest(0)) is Outcome.NOT_WRITTEN
    assert fault.met.is_set()
    assert log.appended(store.manifest(0)) is Outcome.NOT_WRITTEN
    proxy.heal()
    log.append_timeout_ms = 60_000
    assert log.appended(store.manifest(0, parallelism=3)) is Outcome.DONE
    assert store.opened().history.manifests == {0: store.manifest(0, parallelism=3)}


@pytest.mark.parametrize("fate", [Fate.REQUEST_LOST, Fate.ANSWER_LOST])
@pytest.mark.parametrize("api", [PRODUCE, END_TXN])
def test_one_request_without_an_answer(store: Any, proxy: KafkaProxy, api: int, fate: Fate) -> None:
    log = store.living()
    fault = proxy.arm(Fault(api, fate))
    assert log.appended(store.manifest(0), store.mark(0)) is Outcome.DONE
    assert fault.met.is_set()
    assert log.appended(store.manifest(1)) is Outcome.DONE
    log.close()
    assert list(store.opened().history.manifests) == [0, 1]
