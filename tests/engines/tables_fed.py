"""Two topics of tables that change, and the judge of their join: a consumer's last values against SQL over both."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import duckdb
from confluent_kafka import Producer
from window_clicks import insert

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

NEWEST = 'from {side}_read qualify row_number() over (partition by key order by "offset" desc) = 1'
JOINED = f"""
    select l.key, l.id, r.id from (from ({NEWEST.format(side="left")}) where id is not null) l {{how}} join
    (from ({NEWEST.format(side="right")}) where id is not null) r on l.ref = r.key
"""
PETS, OWNERS = 40, 7


class Tables:
    """Pets in three partitions of NAME-in, owners in two of NAME-right, which a job joins to NAME-out."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name, self.fed = kafka, name, 0
        kafka.create_topic(f"{name}-right", 2)

    def feed(self, count: int) -> None:
        """*count* more changes of either side: new rows, other owners, deletions, and rows that come again."""
        chance = random.Random(self.fed)
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers, "enable.idempotence": True})
        for id in range(self.fed, self.fed + count):
            pet, owner = chance.randrange(PETS), chance.randrange(OWNERS)
            of = None if chance.random() < 0.1 else f"o{chance.randrange(OWNERS + 1)}"
            value = None if chance.random() < 0.25 else json.dumps({"id": id, "owner": of})
            producer.produce(f"{self.name}-in", value, f"p{pet}", pet % 3)
            value = None if chance.random() < 0.25 else json.dumps({"id": id})
            producer.produce(f"{self.name}-right", value, f"o{owner}", owner % 2)
        assert producer.flush(LIMIT_S) == 0
        self.fed += count

    def assert_joined(self, how: str) -> None:
        """The last values are the join of the last rows; the results of a pet come in the order of its rows, none comes
        again while it stands, and a tombstone comes only where a result stands."""
        deleted = Counter(record.key for record in self.kafka.read_committed(f"{self.name}-right") if not record.value)
        results: dict[str, list[Any]] = defaultdict(list)
        for record in self.kafka.read_committed(f"{self.name}-out"):
            key = (record.key or b"").decode()
            results[key].append(None if record.value is None else json.loads(record.value))
        for key, given in results.items():
            ids = [joined["left"]["id"] for joined in given if joined is not None]
            assert ids == sorted(ids), key
            assert all(before is not None for before, after in zip([None, *given], given, strict=False) if not after)
            again = [after for before, after in pairwise(given) if after is not None and before == after]
            assert not any(joined["right"] for joined in again), key
            # The deletion of an owner without a row gives the pets that refer to it anew.
            assert Counter((joined["left"]["owner"] or "").encode() for joined in again) <= deleted, key
        last = {key: given[-1] for key, given in results.items() if given[-1] is not None}
        assert {key: joined["key"] for key, joined in last.items()} == {key: key for key in last}
        found = [(key, joined["left"]["id"], (joined["right"] or {}).get("id")) for key, joined in last.items()]
        expected = self._by_sql(how)
        assert len(expected) > 5
        assert sorted(found, key=str) == sorted(expected, key=str)

    def _by_sql(self, how: str) -> list[Any]:
        with duckdb.connect() as database:
            for side, topic in (("left", "in"), ("right", "right")):
                database.execute(f'create table {side}_read ("offset" bigint, key text, id bigint, ref text)')
                rows = []
                for record in self.kafka.read_committed(f"{self.name}-{topic}"):
                    row = {} if record.value is None else json.loads(record.value)
                    rows.append((record.offset, (record.key or b"").decode(), row.get("id"), row.get("owner")))
                insert(database, f"{side}_read", rows)
            return database.sql(JOINED.format(how=how)).fetchall()
