"""A sink over HTTP keeps the contract of a sink whose output the leader commits, to a service that remembers keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from http_receiver import Service
from orders_contract import Order, OrdersContract

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks import HttpSink
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.contract import refused
from exactlyonce.testing.sink_contract.hooks import ORIGIN, again
from exactlyonce.testing.sink_contract.sinks import FIRST, SECOND

pytestmark = pytest.mark.broker
TOKEN = "Bearer hunter2-of-the-hook"


class OfOneTest(HttpSink[Order]):
    """A sink whose ledger no other test has."""

    name: str
    client: ClientConfig

    def open_committer(self, context: CommitterContext) -> Committer:
        return super().open_committer(replace(context, pipeline=f"{self.name}-{context.pipeline}", client=self.client))


class TestRequests(OrdersContract):
    ordered = True
    secret = "hunter2-of-the-hook"

    @pytest.fixture(autouse=True)
    def _service(
        self, tmp_path: Path, kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.setenv("HOOK_TOKEN", TOKEN)
        self.client, self.name = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), topic_name
        self.service = Service(tmp_path / "service")
        yield
        self.service.kill()

    def sink(self) -> OfOneTest:
        sink = OfOneTest(self.service.url, headers={"Authorization": "env:HOOK_TOKEN"}, timeout="5s")
        object.__setattr__(sink, "name", self.name)
        object.__setattr__(sink, "client", self.client)
        return sink

    def read(self) -> list[Order]:
        return [Order(**body) for body in self.service.counted()]

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        self.service.kill()
        yield
        self.service.start()

    def test_a_store_that_is_away(self) -> None:
        """A service that is away is waited for; the ledger, in Kafka, is there meanwhile."""
        leader, first = self.leader(1), self.staged(FIRST, 1)
        self.commits(leader, first)
        second = self.staged(SECOND, 2, previous=1)
        with self.unavailable():
            for committer in (leader, self.committer()):
                refused(partial(committer.commit, [second], 1, ORIGIN), StoreUnavailable, "It is away.")
                refused(committer.check, StoreUnavailable, "It is away.")
                assert committer.fence(1, ORIGIN) == {0: 1}
        again(lambda: leader.commit([second], 1, ORIGIN))
        self.has_been(leader, second)
        self.seen([*FIRST, *SECOND], "The service was away, and is back: nothing is lost or doubled.")

    test_a_store_that_was_restored: Any = None  # a topic is not put back to a former state
    test_what_the_store_cleans_up: Any = None
