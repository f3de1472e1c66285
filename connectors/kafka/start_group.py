"""The offsets of a consumer group at which a source begins or ends, so that a pipeline can replace a plain consumer.

Invariants: the group is only read; its offsets are taken while it has no members, and none while a transaction that
commits some is open; an offset whose records are not all there is an error, never moved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from kafka.protocol.admin.groups import ListGroupsRequest
from kafka.protocol.consumer import OffsetFetchRequest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import refuse
from exactlyonce.connectors.kafka.group_offsets import TIMEOUT_MS, coordinator
from exactlyonce.connectors.kafka.kafka_protocol import Wire
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.positions import Group

START_GROUP = "start_group"
"""The argument of a source that names a group."""
WITHOUT_MEMBERS = ("Empty", "Dead")
"""The states of a group, of any type, that nobody is in."""
NAMES_VERSION = 9
"""The last version of OffsetFetch that names topics."""


def committed(topics: Topics, source: str, group: str, topic: str, setting: str, place: str) -> dict[int, int]:
    """The offset by partition of *topic* at which *group* would go on; partitions without one are left out.

    For errors: *source* is the id, *setting* the one that names the group, START_GROUP or one of `Position`, *place*
    the topic's name there. Raises `ConfigError` if the group has members, has no offset in the topic, or has one that
    is not in the log; `BrokerUnavailable` as `Topics` does, or if a transaction with its offsets stays open.
    """
    written = f"{setting}={group!r}" if setting == START_GROUP else f"{setting}={str(Group(group))!r}"
    wanted = f"Source {source!r}, with {written}"
    first, end = topics.start_offsets(topic), topics.end_offsets(topic, committed=False)
    offsets, epochs = _read(topics.config, wanted, group, topic, list(first))
    if not offsets:
        elsewhere = "begin elsewhere, as by start=" if setting == START_GROUP else f"give {setting} another position"
        raise ConfigError(
            f"{wanted}: the group has no offset in topic {topic!r}: its name is wrong, it never committed any, or they "
            f"have expired (offsets.retention.minutes). Correct the group's name, or {elsewhere}."
        )
    problems = [
        f"{topic}[{partition}] offset {offset}: {problem}"
        for partition, offset in offsets.items()
        if (problem := _problem(offset, first[partition], end[partition]))
    ]
    if not problems:
        ends = topics.epoch_ends(topic, epochs)
        problems = [
            f"{topic}[{partition}] offset {offsets[partition]}: the log was truncated, and what leader epoch "
            f"{epochs[partition]} wrote before it " + ("is gone" if end < 0 else f"ends at offset {end}")
            for partition, end in ends.items()
            if end < offsets[partition]
        ]
    if problems:
        within = {p: min(max(offset, first[p]), end[p]) for p, offset in offsets.items()}
        accepting = f"leave out {START_GROUP}= and accept it with start={within}"
        if setting != START_GROUP:
            accepting = f"accept it with {setting}='{json.dumps({place: {**first, **within}})}'"
        raise ConfigError(
            f"{wanted}: that leaves a gap or a double: {'; '.join(problems)}.\n"
            f"  Choices: restore the records from a replica or backup; set the group's offsets anew "
            f"(kafka-consumer-groups --reset-offsets); or {accepting}."
        )
    return offsets


def _problem(offset: int, first: int, end: int) -> str:
    if offset < first:
        return f"the topic begins at {first} now, so that retention has taken offsets {offset} to {first - 1}"
    return f"the topic ends at {end}: it was truncated or made anew" if offset > end else ""


def _read(
    config: ClientConfig, wanted: str, group: str, topic: str, partitions: list[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The offsets, and the leader epochs that came with them, by partition."""
    with closing(Wire(config, timeout_ms=TIMEOUT_MS)) as wire:
        answer = wire.retrying(
            lambda: _ask(wire, wanted, group, topic, partitions), f"Asking for the offsets of group {group}"
        )
    known = [entry for entry in answer if entry.committed_offset >= 0]
    return (
        {entry.partition_index: entry.committed_offset for entry in known},
        {entry.partition_index: entry.committed_leader_epoch for entry in known if entry.committed_leader_epoch >= 0},
    )


def _ask(wire: Wire, wanted: str, group: str, topic: str, partitions: list[int]) -> list[Any]:
    """The answer by partition. The members are asked for first: what the last one commits is seen."""
    found = coordinator(wire, group)
    refuse(found.error_code, f"Finding the coordinator of group {group}")
    listed = wire.ask(ListGroupsRequest(), found.node_id)
    refuse(listed.error_code, f"Asking for the members of group {group}")
    _require_no_members(wanted, group, {entry.group_id: entry.group_state for entry in listed.groups})
    of_group = OffsetFetchRequest.OffsetFetchRequestGroup
    wanted = of_group.OffsetFetchRequestTopics(name=topic, partition_indexes=partitions)
    message = OffsetFetchRequest(
        groups=[of_group(group_id=group, topics=[wanted])], require_stable=True, max_version=NAMES_VERSION
    )
    answer = wire.ask(message, found.node_id).groups[0]
    doing = f"Asking for the offsets of group {group}"
    refuse(answer.error_code, doing)
    entries = [entry for answered in answer.topics for entry in answered.partitions]
    for entry in entries:
        refuse(entry.error_code, f"{doing} in {topic}-{entry.partition_index}")
    return sorted(entries, key=lambda entry: entry.partition_index)


def _require_no_members(wanted: str, group: str, states: Mapping[str, str]) -> None:
    state = states.get(group, WITHOUT_MEMBERS[0])
    if state not in WITHOUT_MEMBERS:
        raise ConfigError(
            f"{wanted}: the group still has members (it is {state}): what they read from now on would be read twice. "
            f"Stop every consumer of the group and start again. One that died without leaving counts until its session "
            f"times out."
        )
