"""The checkpoint topic itself: created as it must be, or refused.

Its records stay until the coordinator tombstones them: the topic is compacted, and deletes nothing by age or size.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from threading import Event
from typing import NamedTuple
from uuid import UUID

from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.checkpoint.settings import PARTITIONS, PARTITIONS_MIN
from exactlyonce.connectors.kafka.client import MESSAGE_SIZE_MAX
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, TopicError, require
from exactlyonce.pipeline.names import checkpoint_topic

TIMEOUT_MS = 8_000
_SETTLING_S = 3.0
"""How long brokers may take to learn of a setting that the creator of the topic has just altered."""
_HOUR_MS = 60 * 60 * 1000


class _Need(NamedTuple):
    setting: str
    relation: str
    """"=", "<=" or ">=": how the setting must compare to `value`, which a new topic gets."""
    value: str

    def met_by(self, setting: str) -> bool:
        if self.relation == "=":
            return setting == self.value
        low, high = (setting, self.value) if self.relation == "<=" else (self.value, setting)
        return float(low) <= float(high)


class AtOdds(NamedTuple):
    """A setting of a topic that is not as it must be."""

    setting: str
    value: str
    """The value that it must have."""
    what: str
    """For people."""


NEEDS = (
    _Need("cleanup.policy", "=", "compact"),
    _Need("segment.bytes", "<=", str(64 * 1024 * 1024)),
    _Need("segment.ms", "<=", str(10 * 60 * 1000)),
    _Need("delete.retention.ms", ">=", str(24 * _HOUR_MS)),
    _Need("min.cleanable.dirty.ratio", "<=", "0.1"),
    _Need("max.compaction.lag.ms", "<=", str(_HOUR_MS)),
    _Need("max.message.bytes", ">=", str(MESSAGE_SIZE_MAX)),
    _Need("unclean.leader.election.enable", "=", "false"),
)
"""The settings of the topic. A tombstone outlives the longest read (`delete.retention.ms`), blocks fit into a batch."""


def prepare_topic(config: ClientConfig, pipeline: str, partitions: int = PARTITIONS) -> TopicInfo:
    """The checkpoint topic of *pipeline*, created unless it exists, and checked.

    Raises `TopicError`, with the command that fixes a topic which is not as it must be, and `BrokerUnavailable` within
    about ten seconds where no broker answers.
    """
    with closing(Topics(config, timeout_ms=TIMEOUT_MS)) as topics:
        return prepared(topics, pipeline, partitions)


def prepared(topics: Topics, pipeline: str, partitions: int) -> TopicInfo:
    """As `prepare_topic`, over the connections of *topics*."""
    require(partitions >= PARTITIONS_MIN, f"A checkpoint topic has at least {PARTITIONS_MIN} partitions")
    name = checkpoint_topic(pipeline)
    topic = describe(topics, name)
    if topic is None:
        topics.create(name, partitions=partitions, settings={need.setting: need.value for need in NEEDS})
        topic = describe(topics, name)
        if topic is None:
            raise BrokerUnavailable(f"Topic {name} was created, and not every broker knows it yet. Run again.")
        _fix_min_insync(topics, topic)
    return _checked(topics, topic)


def find_topic(config: ClientConfig, pipeline: str) -> TopicInfo:
    """The existing checkpoint topic of *pipeline*; `TopicError` if there is none."""
    with closing(Topics(config, timeout_ms=TIMEOUT_MS)) as topics:
        return found(topics, pipeline)


def found(topics: Topics, pipeline: str) -> TopicInfo:
    """As `find_topic`, over the connections of *topics*."""
    name = checkpoint_topic(pipeline)
    topic = describe(topics, name)
    if topic is None:
        raise TopicError(
            f"{pipeline} has no checkpoints at {topics.config.bootstrap_servers}: there is no topic {name}. Check the "
            f"address, and the name of the pipeline (the option sinkId in Spark); or run it first."
        )
    return topic


def describe(topics: Topics, name: str) -> TopicInfo | None:
    """The topic *name* as it is now; None if there is none."""
    facts = topics.facts(name)
    if facts is None:
        return None
    if not facts.visible:
        raise ConfigError(f"We may not describe topic {name}. Grant Read on it to the principal that we log in as.")
    topic_id = base64.b64encode(UUID(facts.topic_id).bytes).decode().rstrip("=")
    return TopicInfo(name, topic_id, len(facts.replicas), min(facts.replicas))


def as_topic(info: TopicInfo) -> Topic:
    """The checkpoint topic as `Topics` knows it: `TopicInfo` has its id in base64."""
    return Topic(info.name, str(UUID(bytes=base64.b64decode(info.topic_id + "=="))), info.partitions)


def min_insync_needed(replicas: int) -> int:
    """A lost broker must cost neither decisions nor progress; with fewer than three replicas one of them must give."""
    return replicas - 1 if replicas >= 3 else 1


def _fix_min_insync(topics: Topics, topic: TopicInfo) -> None:
    """Only after the creation the number of replicas is known, which is the broker's default."""
    needed = min_insync_needed(topic.replicas)
    if not needed <= int(topics.settings(topic.name)["min.insync.replicas"] or 0) <= topic.replicas:
        topics.alter(topic.name, {"min.insync.replicas": str(needed)})


def _checked(topics: Topics, topic: TopicInfo) -> TopicInfo:
    if topic.partitions < PARTITIONS_MIN:
        raise TopicError(
            f"Topic {topic.name} has {topic.partitions} partition; checkpoints need {PARTITIONS_MIN} or more: one for "
            f"decisions, the others for blocks. Delete it and let exactlyonce create it."
        )
    deadline = time.monotonic() + _SETTLING_S
    while wrong := settings_at_odds(topics.settings(topic.name), topic.replicas):
        if {setting.setting for setting in wrong} != {"min.insync.replicas"} or time.monotonic() > deadline:
            details = "; ".join(setting.what for setting in wrong)
            raise TopicError(
                f"Topic {topic.name} would not keep checkpoints safe: {details}. Fix it with\n"
                f"  {fixing(topics.config, topic.name, wrong)}"
            )
        Event().wait(0.05)
    return topic


def settings_at_odds(settings: Mapping[str, str | None], replicas: int) -> list[AtOdds]:
    """The *settings* of a checkpoint topic with so many replicas that are not as they must be."""
    needs = (
        *NEEDS,
        _Need("min.insync.replicas", ">=", str(min_insync_needed(replicas))),
        _Need("min.insync.replicas", "<=", str(replicas)),
    )
    return [
        AtOdds(need.setting, need.value, f"{need.setting} is {value}, must be {need.relation} {need.value}")
        for need in needs
        if (value := settings.get(need.setting)) is not None and not need.met_by(value)
    ]


def fixing(config: ClientConfig, topic: str, wrong: Iterable[AtOdds]) -> str:
    """The command that sets them right."""
    return (
        f"kafka-configs --bootstrap-server {config.bootstrap_servers} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {','.join(f'{setting.setting}={setting.value}' for setting in wrong)}"
    )
