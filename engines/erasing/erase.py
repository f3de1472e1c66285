"""The deletion of what a pipeline has in a cluster besides its output: for a reset, and of a run that was cancelled.

Invariants: it begins once nothing that is decided waits any more, or a person has agreed to lose it; every step takes
what belongs to one checkpoint topic, by its id, so that it may be repeated by anybody and whoever slept meanwhile takes
nothing of the life that has begun since, nor fences it (but see `last_look`); before the topic goes, a transactional id
says that this was meant, so that the next run knows it from a topic that was lost. Whoever finds the deletion of a
cancelled run begun finishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress

from exactlyonce.checkpoint.records.committable import erased_id
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.settings import PARTITIONS, PARTITIONS_MIN
from exactlyonce.checkpoint.transactions.last_look import last_look
from exactlyonce.checkpoint.transactions.transactional_writer import TransactionalWriter
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import as_topic
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic, prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.processes import this_process
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, StorageUnavailable, TopicError
from exactlyonce.pipeline.failpoints import hit


def erase_condemned(config: ClientConfig, topic: TopicInfo, history: History, note: Callable[[str], None]) -> list[str]:
    """Delete what the run that *history* ends with has condemned; see `erase`."""
    newest = history.newest_incarnation
    assert newest is not None
    assert newest.condemned
    return erase(
        config, history.pipeline, topic, note, storages=storages_of(history), inputs=inputs_of(history),
        above=newest.incarnation, cancelled=newest.cancelled,
    )  # fmt: skip


def storages_of(history: History) -> dict[str, bool]:
    """Where blocks are kept outside of the topic, or were, and whether the newest checkpoint is."""
    return {each: each == history.storage for each in history.storages if each}


def stores_of(history: History) -> list[str]:
    """The sinks whose stores have a ledger of it."""
    return sorted({sink for each in history.retained for sink, _, _ in each.ledger})


def inputs_of(history: History) -> dict[str, list[int]]:
    """The partitions that the pipeline reads, by topic."""
    found: dict[str, set[int]] = {}
    for manifest in history.retained:
        for each in manifest.offsets:
            found.setdefault(each.topic, set()).add(each.partition)
    return {topic: sorted(partitions) for topic, partitions in sorted(found.items())}


def erase(
    config: ClientConfig,
    pipeline: str,
    topic: TopicInfo | None,
    note: Callable[[str], None],
    *,
    storages: Mapping[str, bool],
    inputs: Mapping[str, Sequence[int]],
    above: int,
    cancelled: str = "",
) -> list[str]:
    """Delete *topic* and what belongs to it; returns the input topics in which a consumer keeps the group's offsets.

    The new checkpoint topic begins with an incarnation above *above*, the highest that was. It has ended, and answers
    the request *cancelled*. *note* is told of a storage that the pipeline has left and that cannot be reached: it may
    be gone for good, and does not stand in the way.
    """
    kept = group_offsets.forget(config, pipeline, inputs)
    if topic is not None:
        for storage, is_newest in storages.items():
            with closing(block_storage(config, topic, storage)) as blocks:
                try:
                    blocks.erase()
                except (StorageUnavailable, ConfigError) as error:
                    if is_newest:
                        raise
                    note(f"What may be left of it in {storage} stays, for nobody is told of it from now on: {error}")
        hit("erasing-blocks")
        _mark(config, pipeline, topic, above)
        with closing(Topics(config)) as topics:
            topics.delete(as_topic(topic))
        hit("erasing-topic")
    _begin_anew(config, pipeline, topic, above, cancelled)
    return kept


def _mark(config: ClientConfig, pipeline: str, topic: TopicInfo, incarnation: int) -> None:
    """See `committable.erased_id`. Whoever has deleted *topic* meanwhile has done so."""
    with closing(Connections(config, pipeline)) as connections, _unless_gone(config, pipeline, topic):
        connections.open_log(topic)
        marker = TransactionalWriter(erased_id(pipeline, incarnation), topic.name, connections.clock)
        connections.drive(marker.open())


def _begin_anew(config: ClientConfig, pipeline: str, erased: TopicInfo | None, above: int, cancelled: str) -> None:
    """In a topic with as many partitions as the one that was *erased*; nothing is done where somebody was faster: where
    an incarnation is there, or begins."""
    partitions = max(erased.partitions, PARTITIONS_MIN) if erased is not None else PARTITIONS
    topic = prepare_topic(config.confluent(), pipeline, partitions)
    host, process, machine = this_process()
    connections = Connections(config, pipeline)
    with closing(connections), suppress(Fenced), _unless_gone(config, pipeline, topic):
        log = connections.open_log(topic)
        if connections.drive(last_look(pipeline, log.peek_at_stable, connections.clock)).incarnation_latest:
            return
        connections.drive(log.open())
        connections.drive(log.begin(host, process, above, machine=machine))
        connections.drive(log.heartbeat(ended=True, cancelled=cancelled))


@contextmanager
def _unless_gone(config: ClientConfig, pipeline: str, topic: TopicInfo) -> Iterator[None]:
    """While *topic* is written to: that it is not there any more is no halt, for who deletes it does the same."""
    try:
        yield
    except (Halt, TopicError):
        with suppress(TopicError):
            if find_topic(config.confluent(), pipeline).topic_id == topic.topic_id:
                raise
