"""The checkpoint topic itself: created as it must be, or refused.

A durable record of it stays until the coordinator tombstones it: compaction only, never deletion by age or size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it re-exports them without saying so
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
    TopicDescription,
)

from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.settings import PARTITIONS, PARTITIONS_MIN
from exactlyonce.connectors.kafka import client as store_client
from exactlyonce.connectors.kafka.errors import Again, explained, retried
from exactlyonce.pipeline.errors import BrokerUnavailable, TopicError, require
from exactlyonce.pipeline.names import checkpoint_topic

_VISIBLE_TIMEOUT_S = 60.0
_SETTLING_S = 3.0
"""How long brokers may take to learn of a setting that whoever created the topic has just altered."""
_HOUR_MS = 60 * 60 * 1000


class _Need(NamedTuple):
    setting: str
    relation: str
    """"=", "<=" or ">=": how what is set must stand to `value`, which is also what a new topic gets."""
    value: str

    def met_by(self, found: str) -> bool:
        if self.relation == "=":
            return found == self.value
        low, high = (found, self.value) if self.relation == "<=" else (self.value, found)
        return float(low) <= float(high)


class AtOdds(NamedTuple):
    """A setting of a topic that is not as it must be."""

    setting: str
    value: str
    """What it is to be set to."""
    what: str
    """For people."""


NEEDS = (
    _Need("cleanup.policy", "=", "compact"),
    _Need("segment.bytes", "<=", str(64 * 1024 * 1024)),
    _Need("segment.ms", "<=", str(10 * 60 * 1000)),
    _Need("delete.retention.ms", ">=", str(24 * _HOUR_MS)),
    _Need("min.cleanable.dirty.ratio", "<=", "0.1"),
    _Need("max.compaction.lag.ms", "<=", str(_HOUR_MS)),
    _Need("max.message.bytes", ">=", str(store_client.MESSAGE_SIZE_MAX)),
    _Need("unclean.leader.election.enable", "=", "false"),
)
"""The settings of the topic. A tombstone outlives the longest read (`delete.retention.ms`), blocks fit into a batch."""


def prepare_topic(config: Mapping[str, Any], pipeline: str, partitions: int = PARTITIONS) -> TopicInfo:
    """Create the checkpoint topic of *pipeline* unless it exists, check it, and say what it is.

    Raises `TopicError` with the command that fixes a topic which is not as it must be, `BrokerUnavailable` within about
    ten seconds where no broker answers.
    """
    require(partitions >= PARTITIONS_MIN, f"A checkpoint topic has at least {PARTITIONS_MIN} partitions")
    name = checkpoint_topic(pipeline)
    with explained(config, f"preparing topic {name}"):
        client = store_client.admin(config)
        found = describe(client, name)
        if found is None:
            _create(client, name, partitions)
            found = _await(client, name)
            _fix_min_insync(client, found)
        return _checked(client, config, found)


def find_topic(config: Mapping[str, Any], pipeline: str) -> TopicInfo:
    """The existing checkpoint topic of *pipeline*; `TopicError` if there is none."""
    name = checkpoint_topic(pipeline)
    with explained(config, f"looking for topic {name}"):
        found = describe(store_client.admin(config), name)
    if found is None:
        raise TopicError(
            f"{pipeline} has no checkpoints at {config.get('bootstrap.servers')}: there is no topic {name}. Check the "
            f"name of the pipeline, or the sinkId, and the address."
        )
    return found


def describe(client: AdminClient, name: str) -> TopicInfo | None:
    """The topic *name* as it is now; None if there is none."""
    names, limit_s = TopicCollection([name]), store_client.REQUEST_TIMEOUT_S
    try:  # no variable holds the future: what it raises would hold it, and the client's threads, until a collection
        topic: TopicDescription = client.describe_topics(names, request_timeout=limit_s)[name].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise
    replicas = min((len(each.replicas) for each in topic.partitions), default=0)
    return TopicInfo(name, str(topic.topic_id), len(topic.partitions), replicas)


def _create(client: AdminClient, name: str, partitions: int) -> None:
    topic = NewTopic(name, partitions, config={need.setting: need.value for need in NEEDS})
    try:
        client.create_topics([topic], request_timeout=store_client.REQUEST_TIMEOUT_S)[name].result()
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # then another instance was faster
            raise


def _await(client: AdminClient, name: str) -> TopicInfo:
    """Wait until all brokers know the new topic and its partitions have leaders."""

    def attempt() -> TopicInfo:
        try:
            found = describe(client, name)
            if found is None:
                raise Again("not every broker knows it")
            store_client.end_offsets(client, name, range(found.partitions))
        except KafkaException as error:  # it has no leader yet
            raise Again(error.args[0].str()) from error
        return found

    try:
        return retried(attempt, time.monotonic() + _VISIBLE_TIMEOUT_S)
    except Again as obstacle:
        raise BrokerUnavailable(
            f"Topic {name} was created, but is not usable after {_VISIBLE_TIMEOUT_S:.0f} s: {obstacle}."
        ) from None


def min_insync_needed(replicas: int) -> int:
    """A lost broker must cost neither decisions nor progress; with fewer than three replicas one of them must give."""
    return replicas - 1 if replicas >= 3 else 1


def _fix_min_insync(client: AdminClient, topic: TopicInfo) -> None:
    """Of a topic that was just created: only now its number of replicas, the broker's default, is known."""
    needed = min_insync_needed(topic.replicas)
    if not needed <= int(_settings(client, topic.name)["min.insync.replicas"]) <= topic.replicas:
        entry = ConfigEntry("min.insync.replicas", str(needed), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic.name, incremental_configs=[entry])
        client.incremental_alter_configs([resource])[resource].result()


def _settings(client: AdminClient, name: str) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, name)
    answer = client.describe_configs([resource], request_timeout=store_client.REQUEST_TIMEOUT_S)[resource].result()
    return {setting: entry.value for setting, entry in answer.items()}


def _checked(client: AdminClient, config: Mapping[str, Any], topic: TopicInfo) -> TopicInfo:
    if topic.partitions < PARTITIONS_MIN:
        raise TopicError(
            f"Topic {topic.name} has {topic.partitions} partition; checkpoints need {PARTITIONS_MIN} or more: one for "
            f"decisions, the others for blocks. Delete it and let exactlyonce create it."
        )
    deadline = time.monotonic() + _SETTLING_S
    while wrong := settings_at_odds(_settings(client, topic.name), topic.replicas):
        if {each.setting for each in wrong} != {"min.insync.replicas"} or time.monotonic() > deadline:
            break
        client.poll(0.05)
    if wrong:
        details = "; ".join(each.what for each in wrong)
        raise TopicError(
            f"Topic {topic.name} would not keep checkpoints safe: {details}. Fix it with\n"
            f"  {fixing(config, topic.name, wrong)}"
        )
    return topic


def settings_at_odds(found: Mapping[str, str | None], replicas: int) -> list[AtOdds]:
    """Those of a checkpoint topic with so many replicas that are not as they must be, of all that were *found*."""
    needs = (
        *NEEDS,
        _Need("min.insync.replicas", ">=", str(min_insync_needed(replicas))),
        _Need("min.insync.replicas", "<=", str(replicas)),
    )
    shown = ((need, found.get(need.setting)) for need in needs)
    return [
        AtOdds(need.setting, need.value, f"{need.setting} is {is_now}, must be {need.relation} {need.value}")
        for need, is_now in shown
        if is_now is not None and not need.met_by(is_now)
    ]


def fixing(config: Mapping[str, Any], topic: str, wrong: Iterable[AtOdds]) -> str:
    """The command that sets them right."""
    return (
        f"kafka-configs --bootstrap-server {config.get('bootstrap.servers')} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {','.join(f'{each.setting}={each.value}' for each in wrong)}"
    )
