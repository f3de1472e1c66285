"""The topics: whether one was replaced, and whether the records that checkpoints need are still there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.topics import Topic, TopicFacts, Topics
from exactlyonce.connectors.source import ReadsTopic
from exactlyonce.engines.external_checks.input_topics import InputTopics
from exactlyonce.engines.external_checks.preflight import MADE_ANEW, output_gone, require_unread
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import Halt, TopicError
from exactlyonce.pipeline.sizes import counted
from exactlyonce.views.doctor.findings import NOTE, PROBLEM, Findings
from exactlyonce.views.doctor.subject import Subject

SOON_SHARE = 4
"""Retention may soon take a record that was not read in three fourths of the retention time."""


def check_inputs(subject: Subject, topics: Topics, facts: Mapping[str, TopicFacts | None], findings: Findings) -> None:
    """Compare the topics with the offsets in the checkpoints."""
    for place, source in sorted(subject.read_elsewhere.items()):
        with findings.checking(f"topic {place}"), closing(InputTopics(topics)) as clusters:
            _check_elsewhere(subject, place, source, clusters, findings)
    for topic in subject.inputs:
        if topic in facts and facts[topic] is None:
            findings.add(
                "inputs", f"Topic {topic} is missing", whose="the topic's (input)",
                do="create it, or correct its name in the pipeline",
            )  # fmt: skip
    if subject.newest is not None:
        _check_outputs(subject.newest, facts, findings)
    if subject.newest is None or subject.resources.is_sink:
        return
    for name in sorted({position.topic for position in subject.newest.in_cluster}):
        known = facts.get(name)
        if known is not None and known.visible:
            with findings.checking(f"what checkpoints need of {name}"):
                there = Topic(name, known.topic_id, len(known.replicas))
                _unread(subject, subject.newest, topics, there, name, findings)


def _check_outputs(newest: Manifest, facts: Mapping[str, TopicFacts | None], findings: Findings) -> None:
    """Compare the output topics with those that the checkpoint has written to."""
    for name, before in sorted(newest.output_ids.items()):
        known = facts.get(name)
        if known is not None and known.visible and known.topic_id != before:
            what, _, choices = str(output_gone(newest, name, MADE_ANEW)).partition("\n")
            do = choices.strip().removeprefix("Choices: ")
            findings.add("outputs", what, whose="the topic's (output)", do=do)


def _check_elsewhere(
    subject: Subject, place: str, source: ReadsTopic, clusters: InputTopics, findings: Findings
) -> None:
    """Compare the topic of another cluster with the offsets in the checkpoints."""
    try:
        topic = clusters.describe([source])[place]
    except TopicError:
        findings.add(
            "inputs", f"Topic {place} is missing", whose="the topic's (input)",
            do="create it, or correct its name or its cluster in the pipeline",
        )  # fmt: skip
        return
    newest = subject.newest
    if newest is not None and newest.positions_at(place):
        _unread(subject, newest, clusters.of(source), topic, place, findings)


def _unread(subject: Subject, newest: Manifest, topics: Topics, topic: Topic, place: str, findings: Findings) -> None:
    """Check *topic* as the start of a run does; if that would halt, skip the other checks."""
    try:
        require_unread(topics, newest, topic, place)
    except Halt as error:
        what, _, choices = str(error).partition("\n")
        do = choices.strip().removeprefix("Choices: ") or f"`exactlyonce reset {subject.name}`"
        findings.add("inputs", what, whose="the topic's (input)", do=do)
        return
    first = topics.start_offsets(topic.name)
    for manifest in subject.history.retained if subject.history is not None else ():
        if any(first.get(at.partition, 0) > at.offset for at in manifest.positions_at(place)):
            findings.add(
                "inputs", f"{place} no longer has the input after checkpoint {manifest.checkpoint}, which is "
                f"retained: the checkpoint after it can be neither audited nor repaired by a replay",
                whose="retention of the topic",
                do="raise retention.ms of the topic above the age of the oldest checkpoint, or keep fewer checkpoints "
                "(--num-retained)",
            )  # fmt: skip
            break
    _deadline(subject, newest, topics, topic.name, place, findings)


def _deadline(subject: Subject, newest: Manifest, topics: Topics, topic: str, place: str, findings: Findings) -> None:
    """Report unread records that retention may soon take, by their own time, which may be long ago.

    Added partitions are not read yet.
    """
    settings = topics.settings(topic)
    retention_ms = int(settings.get("retention.ms") or -1)
    if retention_ms < 0 or "delete" not in (settings.get("cleanup.policy") or ""):
        return
    soon_ms, began_ms = retention_ms // SOON_SHARE, subject.now_ms - retention_ms
    read: dict[int, int] = {}
    for position in newest.positions_at(place):
        read[position.partition] = min(position.offset, read.get(position.partition, position.offset))

    def older(than_ms: int) -> int:
        kept = topics.offsets_at(topic, than_ms)
        return sum(max(0, offset - read.get(partition, 0)) for partition, offset in kept.items())

    if unread := older(began_ms + soon_ms):
        when = "at any time" if older(began_ms) else f"within {shown_duration(soon_ms)}"
        findings.add(
            "inputs", f"{counted(unread, 'offset')} of {place} still to be read: retention may take the first "
            f"{when}", whose=f"retention of the topic: {shown_duration(retention_ms)}",
            do=f"run {subject.name} before that, or raise retention.ms of {place}",
            level=NOTE if subject.sign_of_life else PROBLEM,
        )  # fmt: skip
