"""The servers that cells run on: a broker behind a proxy and a PostgreSQL, which end with the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cells import Servers
from kafka_proxy import proxied_broker

from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.servers.postgres import PostgresServer


@contextmanager
def opened(folder: Path) -> Iterator[Servers]:
    proxy, broker = proxied_broker(folder / "kafka")
    postgres = PostgresServer()
    postgres.start()
    trials = folder / "trials"
    trials.mkdir(exist_ok=True)
    try:
        yield Servers(KafkaCluster(proxy.bootstrap_servers), proxy, postgres, trials)
    finally:
        proxy.close()
        broker.kill()
        postgres.remove()
