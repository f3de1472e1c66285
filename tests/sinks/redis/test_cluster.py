"""A Redis Cluster: rows and ledger have to lie in one slot, and are found wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis_rows import Total, begun, chunks_of, entry, store_of
from waiting import until

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.redis.store import RedisStore
from exactlyonce.testing.servers.redis import RedisServer

Own = Callable[..., RedisServer]
SLOTS = 16384
LEDGER = "exactlyonce_ledger:{shop}:shop:totals"


def tagged(server: RedisServer) -> RedisStore:
    return begun(store_of(server.url, kind="stream", hash_tag="shop", key=lambda total: f"{{shop}}:{total.customer}"))


def gather(*servers: RedisServer) -> None:
    share = SLOTS // len(servers)
    for number, server in enumerate(servers):
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, (number + 1) * share - 1)
        server.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        server.client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port, servers[0].bus_port)
    until(lambda: all("cluster_state:ok" in str(each.client.execute_command("CLUSTER", "INFO")) for each in servers))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("cluster"), **{"cluster-enabled": "yes"})
    gather(server)
    yield server
    server.kill()


def test_a_cluster_asks_for_a_hash_tag(node: RedisServer) -> None:
    with pytest.raises(StoreError, match=r'hash_tag="totals", and let key= begin every key with \{totals\}'):
        store_of(node.url).check()


def test_rows_and_ledger_lie_in_one_slot(node: RedisServer) -> None:
    store = tagged(node)
    store.check()
    store.fence("shop", "totals", 1, "t")
    assert store.apply(chunks_of(store, [Total("ann", 1), Total("bob", 2)]), entry(1))
    slots = {node.client.execute_command("CLUSTER", "KEYSLOT", key) for key in node.client.scan_iter()}
    assert sorted(node.client.keys()) == [LEDGER, "{shop}:ann", "{shop}:bob"]
    assert len(slots) == 1


def test_the_slot_is_found_on_another_server(own_server: Own) -> None:
    servers = [own_server(cluster_enabled="yes") for _ in range(2)]
    gather(*servers)
    stores = [tagged(server) for server in servers]
    for checkpoint, store in enumerate(stores, 1):
        store.check()
        assert store.apply(chunks_of(store, [Total("ann", checkpoint)]), entry(checkpoint))
    slot = servers[0].client.execute_command("CLUSTER", "KEYSLOT", LEDGER)
    holder = servers[slot // (SLOTS // 2)]
    assert holder.client.xlen("{shop}:ann") == 2
