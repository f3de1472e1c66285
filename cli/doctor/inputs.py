"""The inputs: whether they are those that were read, and whether what checkpoints need of them is still there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.cli import text
from exactlyonce.cli.doctor.findings import Findings
from exactlyonce.cli.doctor.questions import TopicFacts
from exactlyonce.cli.doctor.subject import Subject
from exactlyonce.connectors.kafka.topics import Topics

SOON_SHARE = 4
"""A fourth of the retention time before unread input may be taken is soon."""


def check_inputs(subject: Subject, topics: Topics, facts: Mapping[str, TopicFacts | None], findings: Findings) -> None:
    """Compare what is there with what the checkpoints have noted."""
    for topic in subject.inputs:
        if topic in facts and facts[topic] is None:
            findings.add(
                "inputs", f"Topic {topic} is missing", whose="the topic's (input)",
                do="create it, or correct its name in the pipeline",
            )  # fmt: skip
    if subject.newest is None or subject.traces.is_sink:
        return
    by_topic: defaultdict[str, list[SourceOffset]] = defaultdict(list)
    for each in subject.newest.offsets:
        by_topic[each.topic].append(each)
    for topic, noted in sorted(by_topic.items()):
        found = facts.get(topic)
        if found is None or not found.visible:
            continue
        if found.topic_id != noted[0].topic_id:
            findings.add(
                "inputs", f"Topic {topic} was deleted and created again since checkpoint {subject.newest.checkpoint}: "
                f"its id was {noted[0].topic_id}, and is {found.topic_id}", whose="the topic's (input)",
                do=f"restore the old topic, or `exactlyonce reset {subject.name}` and recompute from what is there",
            )  # fmt: skip
            continue
        with findings.checking(f"retention of {topic} against the checkpoints"):
            _retention(subject, subject.newest, topics, topic, noted, findings)


def _retention(
    subject: Subject, newest: Manifest, topics: Topics, topic: str, noted: list[SourceOffset], findings: Findings
) -> None:
    first, ends = topics.start_offsets(topic), topics.end_offsets(topic, committed=False)
    gone = [each for each in noted if first.get(each.partition, 0) > each.offset]
    for each in gone:
        findings.add(
            "inputs", f"{topic}[{each.partition}] begins at offset {first[each.partition]}, and checkpoint "
            f"{newest.checkpoint} goes on at {each.offset}: what lies between was not read, and is gone",
            whose="retention of the topic",
            do=f"restore it from a replica or a backup, or `exactlyonce reset {subject.name}`",
        )  # fmt: skip
    if gone:
        return
    history = subject.history
    for manifest in history.retained if history is not None else ():
        if any(o.topic == topic and first.get(o.partition, 0) > o.offset for o in manifest.offsets):
            findings.add(
                "inputs", f"{topic} no longer has the input behind checkpoint {manifest.checkpoint}, which is "
                f"retained: the checkpoint after it can be neither audited nor repaired by a replay",
                whose="retention of the topic",
                do="raise retention.ms of the topic above the age of the oldest checkpoint, or keep fewer checkpoints "
                "(--num-retained)",
            )  # fmt: skip
            break
    unread = sum(max(0, ends.get(each.partition, 0) - each.offset) for each in noted)
    if unread and not subject.sign_of_life:
        _deadline(subject, newest, topic, topics.settings(topic), unread, findings)


def _deadline(
    subject: Subject, newest: Manifest, topic: str, settings: Mapping[str, str | None], unread: int, findings: Findings
) -> None:
    """When retention may take what was not read."""
    retention_ms = int(settings.get("retention.ms") or -1)
    if retention_ms < 0 or "delete" not in (settings.get("cleanup.policy") or ""):
        return
    left_ms = newest.completed_at_ms + retention_ms - subject.now_ms
    if left_ms < retention_ms // SOON_SHARE:
        when = f"in {text.duration(left_ms)}" if left_ms > 0 else "at any time"
        findings.add(
            "inputs", f"{text.counted(unread, 'offset')} of {topic} are not read yet, and retention may take the first "
            f"of them {when}", whose=f"retention of the topic: {text.duration(retention_ms)}",
            do=f"run {subject.name} before that, or raise retention.ms of {topic}",
        )  # fmt: skip
