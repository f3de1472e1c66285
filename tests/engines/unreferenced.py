"""A checkpoint topic as a plain reader finds it: its newest decision, and the blocks that nothing refers to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from operator import eq

from confluent_kafka import TopicPartition
from plain_consumer import plain_consumer
from waiting import until

from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockReader
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.runtime.in_flight import blocks_of
from exactlyonce.state.chain import decode_index
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster


def _await_markers(kafka: KafkaCluster, topic: str, partitions: Iterable[int]) -> None:
    """Until no transaction is open in the partitions: the markers of the last one may have been on their way."""
    with closing(Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))) as topics:

        def ends() -> list[dict[int, int]]:
            return [topics.end_offsets(topic, partitions, committed=committed) for committed in (True, False)]

        until(lambda: eq(*ends()), told=ends)


def live_blocks(kafka: KafkaCluster, topic: str, partitions: int) -> set[str]:
    settings = {"enable.partition.eof": True, "auto.offset.reset": "earliest", "fetch.wait.max.ms": 10}
    consumer = plain_consumer(kafka.bootstrap_servers, settings)
    unread = set(range(1, partitions))
    _await_markers(kafka, topic, unread)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in unread])
    live: set[str] = set()
    while unread:
        message = consumer.poll(LIMIT_S)
        assert message is not None, f"partitions {unread} of {topic} are read to their ends"
        if message.error() is not None:
            unread.discard(message.partition() or 0)
            continue
        key = (message.key() or b"").decode()
        (live.discard if message.value() is None else live.add)(key)
    consumer.close()
    return live


def newest_checkpoint(kafka: KafkaCluster, pipeline: str) -> Manifest:
    return read_history(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), pipeline).retained[-1]


def unreferenced_blocks(kafka: KafkaCluster, pipeline: str) -> set[str]:
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    topic = find_topic(config, pipeline)
    live = live_blocks(kafka, topic.name, topic.partitions)
    named: set[BlockRef] = set()
    reader = BlockReader(config.confluent(), topic)
    for manifest in read_history(config, pipeline).retained:
        indexes = [ref for operator in manifest.operators for parts in operator.index for ref in parts]
        named.update(indexes, (ref for log in manifest.order_logs for ref in log.blocks))
        for _, block in reader.fetch(indexes):
            named.update(each.ref for each in decode_index(block.body).blocks)
        named.update(ref for each in manifest.staged for ref in each.blocks)
        named.update(ref for each in manifest.channel_logs for ref in (*each.blocks, *blocks_of(each, reader)))
    keys = {ref.key for ref in named}
    assert keys <= live, "what is referred to is there"
    return live - keys
