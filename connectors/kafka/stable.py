"""The last stable offset of a partition, waited for at the broker: one request that is answered when readers get there.

EndTxn answers before the markers are written. Whoever asks again and again finds them some milliseconds late and loads
the broker meanwhile; a fetch of what is committed waits at the broker, as that of any reader does.
"""

from __future__ import annotations

from kafka.protocol.consumer.fetch import FetchRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import READ_COMMITTED, Leader, Observe, Wire, refuse
from exactlyonce.pipeline.errors import TopicError

FETCH_BYTES = 1
"""Of what is fetched: the broker gives one batch nevertheless, and it is not looked at."""
TIMEOUT_MS = 10_000


class StableOffset:
    """Waits for the last stable offset of one partition. Used by one thread at a time, over connections of its own: a
    request that waits at a broker holds up those behind it."""

    def __init__(
        self, config: ClientConfig, topic: str, topic_id: str, partition: int, observe: Observe | None = None
    ) -> None:
        self._topic, self._topic_id, self._partition = topic, topic_id, partition
        self._wire = Wire(config, timeout_ms=TIMEOUT_MS, observe=observe)

    def reaches(self, end: int, wait_ms: int) -> int:
        """The last stable offset, once all below offset *end* is stable, or *wait_ms* are over.

        *end* is at most the end of the log. Raises `BrokerUnavailable`, and `TopicError` if the topic is gone or was
        made anew.
        """
        doing = f"Waiting for the markers of {self._topic}[{self._partition}]"
        return self._wire.retrying(
            lambda: self._wire.remembering(lambda: self._fetched(end, wait_ms)), doing, timeout_ms=TIMEOUT_MS
        )

    def close(self) -> None:
        """Let go of the connections; the next question makes new ones."""
        self._wire.close()

    def _fetched(self, end: int, wait_ms: int) -> int:
        where = (self._topic, self._partition)
        leader = self._wire.leaders_remembered([where])[where]
        if str(leader.topic_id) != self._topic_id:
            raise TopicError(f"Topic {self._topic} was deleted and created again: its id was {self._topic_id}.")
        answer = self._wire.ask(_fetch(self._topic, self._partition, leader, end, wait_ms), leader.node_id)
        refuse(answer.error_code, f"Reading {self._topic}")
        found = answer.responses[0].partitions[0]
        refuse(found.error_code, f"Reading {self._topic}-{self._partition}")
        stable: int = found.last_stable_offset
        return stable


def _fetch(topic: str, partition: int, leader: Leader, end: int, wait_ms: int) -> FetchRequest:
    """Answered as soon as readers may have the last record below *end*. A fetch at the very end of the log, where the
    marker goes, is answered at once while readers are held before it."""
    entry = FetchRequest.FetchTopic
    wanted = entry.FetchPartition(partition=partition, fetch_offset=max(0, end - 1), partition_max_bytes=FETCH_BYTES)
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=FETCH_BYTES,
        isolation_level=READ_COMMITTED,
        session_epoch=-1,
        topics=[entry(topic=topic, topic_id=leader.topic_id, partitions=[wanted])],
    )
