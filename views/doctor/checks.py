"""The checks of a pipeline, but for its readers: each looks, and adds to the findings.

- settings of brokers and topics that do not fit;
- rights that it lacks, as far as brokers tell them (docs/settings.md, "Access rights"). They do not tell the rights on
  the cluster and on transactional ids, so a request that needs the right is made: for transactional ids the end of a
  transaction under an id that nobody uses, which changes nothing;
- stores: whether they accept writes, and whether their ledgers agree with the decisions;
- inputs: whether a topic was replaced, and whether the records that checkpoints need are still there;
- servers of sources: the log that a database keeps for captured changes;
- blocks in all storages: damaged ones, and those that no manifest needs;
- the decision log: whether it is there and whole, and whether its newest checkpoint is finalized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from exactlyonce.checkpoint.commits.stores import ledger_of, named_ledger, positions_of, require_in_step, require_own
from exactlyonce.checkpoint.kept_blocks import when_given_up
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, SourceOffset
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import TxnState
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.checkpoint_topic.topic import (
    AtOdds,
    find_topic,
    fixing,
    min_insync_needed,
    settings_at_odds,
)
from exactlyonce.connectors.kafka.topics import Topic, TopicFacts, Topics
from exactlyonce.connectors.kafka.transactions import TRANSACTION_VERSION, Transactions
from exactlyonce.connectors.source import ReadsTopic
from exactlyonce.connectors.splits import SplitSource
from exactlyonce.engines.blocks import Storages, damaged_among
from exactlyonce.engines.external_checks.input_topics import InputTopics
from exactlyonce.engines.external_checks.preflight import (
    LOG_APPEND_TIME,
    MADE_ANEW,
    TIMESTAMP_TYPE,
    output_gone,
    require_unread,
)
from exactlyonce.engines.pending_output import GONE, unfinalized_committables
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError, Halt, TopicError, UserError
from exactlyonce.pipeline.event_time import NO_FLOOR
from exactlyonce.pipeline.sizes import counted, shown_bytes
from exactlyonce.sinks.committer import StoreView
from exactlyonce.sinks.kafka.sink import gives_times
from exactlyonce.views import rights
from exactlyonce.views.checkpoints import BlockSurvey, awaited_partitions, needed_blocks, survey
from exactlyonce.views.doctor.findings import NOTE, PROBLEM, Findings, Subject
from exactlyonce.views.rights import CLUSTER, GROUP, Right, rights_of

MESSAGE_BYTES_MAX = 1_000_000
"""The largest record that a producer of librdkafka sends, unless told otherwise."""


@dataclass
class SettingsCheck:
    subject: Subject
    topics: Topics
    transactions: Transactions
    facts: Mapping[str, TopicFacts | None]
    findings: Findings

    def run(self) -> None:
        with self.findings.checking("transaction.max.timeout.ms and transaction.version of the brokers"):
            self._transactions()
        for topic in self.subject.topics:
            facts = self.facts.get(topic)
            if facts is not None and facts.visible:  # another check reports missing topics
                self._replicas(facts)
                with self.findings.checking(f"settings of {topic}"):
                    self._settings(facts, self.topics.settings(topic))

    def _transactions(self) -> None:
        version = self.transactions.transaction_version()
        if version < TRANSACTION_VERSION:
            servers = self.subject.config.bootstrap_servers
            self.findings.add(
                "settings", f"The cluster runs transaction.version {version}, and {TRANSACTION_VERSION} is needed",
                whose="the cluster's",
                do="raise it: Kafka 4.0 or newer",
                run=[f"kafka-features --bootstrap-server {servers} upgrade --feature transaction.version=2"],
            )  # fmt: skip
        try:
            self.subject.settings.transaction_timeout_for(self.transactions.max_timeout_ms())
        except ConfigError as error:
            if "DescribeConfigs" in str(error):
                raise
            self.findings.add(
                "settings", str(error), whose="the brokers', or this run's", do="as it says: a run refuses"
            )

    def _replicas(self, facts: TopicFacts) -> None:
        behind = [
            partition for partition, (has, wanted) in enumerate(zip(facts.in_sync, facts.replicas, strict=True))
            if has < wanted
        ]  # fmt: skip
        if behind:
            self.findings.add(
                "settings", f"{facts.name}{behind} has replicas that are not in sync", whose="the cluster's",
                do="see which brokers are away, and their logs", level=NOTE,
            )  # fmt: skip

    def _settings(self, facts: TopicFacts, given: Mapping[str, str | None]) -> None:
        subject, replicas = self.subject, min(facts.replicas)
        if facts.name == subject.checkpoint_topic:
            self._fix(facts, "would not keep checkpoints safe", settings_at_odds(given, replicas))
            return
        wrong = []
        if given.get("unclean.leader.election.enable") == "true":
            wrong.append(AtOdds("unclean.leader.election.enable", "false", "unclean.leader.election.enable is true"))
        if facts.name in subject.outputs:
            wrong += self._output(facts, given)
        self._fix(facts, "may lose what is committed, or refuse it", wrong)
        sinks = self.subject.graph.sinks if self.subject.graph is not None else ()
        timed = any(gives_times(node.sink) for node in sinks if node.sink and node.sink.topic == facts.name)
        if timed and given.get(TIMESTAMP_TYPE) == LOG_APPEND_TIME:
            shown = f"{TIMESTAMP_TYPE} is {LOG_APPEND_TIME}, and the sink has timestamp="
            self._fix(facts, "does not keep the times of its sink", [AtOdds(TIMESTAMP_TYPE, "CreateTime", shown)])

    def _output(self, facts: TopicFacts, given: Mapping[str, str | None]) -> list[AtOdds]:
        """Settings that refuse records, or that lose them with a broker."""
        wrong = []
        replicas, in_sync = min(facts.replicas), int(given.get("min.insync.replicas") or 1)
        needed = min_insync_needed(replicas)
        if not needed <= in_sync <= replicas:
            shown = f"min.insync.replicas is {in_sync} with {replicas} replicas, should be {needed}"
            wrong.append(AtOdds("min.insync.replicas", str(needed), shown))
        elif min(facts.in_sync) < in_sync:
            self.findings.add(
                "settings", f"{facts.name} takes no records: fewer replicas are in sync than min.insync.replicas, "
                f"{in_sync}", whose="the cluster's", do="see which brokers are away, and their logs",
            )  # fmt: skip
        largest = int(self.subject.config.settings.get("message.max.bytes") or MESSAGE_BYTES_MAX)
        if int(given.get("max.message.bytes") or largest) < largest:
            shown = f"max.message.bytes is {given['max.message.bytes']}, and the sink sends up to {largest} in a record"
            wrong.append(AtOdds("max.message.bytes", str(largest + 48_588), shown))
        return wrong

    def _fix(self, facts: TopicFacts, why: str, wrong: list[AtOdds]) -> None:
        if wrong:
            self.findings.add(
                "settings", f"Topic {facts.name} {why}: {'; '.join(setting.what for setting in wrong)}",
                whose=f"the topic's ({self._role(facts.name)})", do="set it",
                run=[fixing(self.subject.config, facts.name, wrong)],
            )  # fmt: skip

    def _role(self, topic: str) -> str:
        if topic == self.subject.checkpoint_topic:
            return "checkpoints"
        return "output" if topic in self.subject.outputs else "input"


NOBODYS = "doctor"
"""After the prefix: no sink and no coordinator has such an id."""


@dataclass
class RightsCheck:
    subject: Subject
    transactions: Transactions
    facts: Mapping[str, TopicFacts | None]
    findings: Findings

    def run(self) -> None:
        subject = self.subject
        for right in rights_of(subject.name, subject.inputs, subject.outputs, subject.start_groups):
            if right.resource == rights.TOPIC:
                self._topic(right)
            elif right.resource == GROUP:
                what = f"rights on group {right.name}"
                with self.findings.checking(what):
                    self._compare(right, group_offsets.operations(subject.config, right.name), what)
            elif right.resource == CLUSTER:
                with self.findings.checking("rights on the cluster"):
                    self._cluster(right)
            else:
                with self.findings.checking(f"rights on transactional ids {right.name}"):
                    self._transactional_ids(right)

    def _topic(self, right: Right) -> None:
        topic = right.name
        facts, what = self.facts.get(topic), f"rights on topic {topic}"
        if facts is None:
            asked = topic in self.facts or topic not in self.subject.topics
            why = "it is missing; whoever creates it needs Create" if asked else "no broker has told of the topic"
            self.findings.not_checked(what, why, failed=not asked)
            return
        with self.findings.checking(what):
            self._compare(right, facts.operations, what)

    def _compare(self, right: Right, allowed: frozenset[str] | None, what: str) -> None:
        if allowed is None:
            raise ConfigError(f"the brokers do not say what we may do there ({what}): that needs Describe")
        missing = [operation for operation in right.operations if operation not in allowed and "All" not in allowed]
        if missing:
            self._missing(right, missing)

    def _cluster(self, right: Right) -> None:
        try:
            self.transactions.max_timeout_ms()
        except ConfigError:
            self._missing(right, right.operations)

    def _transactional_ids(self, right: Right) -> None:
        self.transactions.transaction_version()  # if this succeeds, a refusal below means that the right is missing
        try:
            self.transactions.end(f"{right.name}{NOBODYS}", 0, 0, commit=False)
        except ConfigError:
            self._missing(right, right.operations)

    def _missing(self, right: Right, missing: Sequence[str]) -> None:
        shown = f"{right.resource} {right.name}".rstrip() + (" (prefixed)" if right.prefixed else "")
        self.findings.add(
            "rights", f"We lack {', '.join(missing)} on {shown}",
            whose="the principal that this command logs in as, which is to be the run's",
            do="let an administrator grant it",
            run=[right.command(self.subject.config.bootstrap_servers, "User:<name>", missing)],
        )  # fmt: skip


def check_stores(subject: Subject, findings: Findings) -> None:
    if subject.graph is None and not subject.resources.is_sink:
        why = "these are known by the pipeline's module alone: give module:pipeline"
        findings.not_checked("outputs since the last checkpoint, and stores of sinks that are not exactly once", why)
    for sink, why in subject.staged.unasked.items():
        findings.not_checked(f"the store of sink {sink}", why, failed=sink in subject.staged.failed)
    for sink, view in subject.staged.views.items():
        findings.checked.append(f"the store of sink {sink}")
        if view.problem:
            findings.add(
                "stores", f"The store of sink {sink} does not take what it writes: {view.problem}",
                whose=f"the store's, or the sink's in the pipeline {subject.name}", do="as it says: a run refuses",
            )  # fmt: skip
        if view.risk:
            findings.add(
                "stores", f"Waiting output of sink {sink} may be removed: {view.risk}", level=NOTE,
                do="let the rule leave out that prefix, or never leave the pipeline stopped or failing for so long",
            )  # fmt: skip
        if view.growth:
            findings.add(
                "stores", f"The table of sink {sink} {view.growth}", level=NOTE,
                do="as it says, by a job beside the pipeline: docs/sinks/lakes.md, Upkeep",
            )  # fmt: skip
        if view.origin and subject.history is not None and subject.newest is not None:
            with findings.checking(f"the ledger of sink {sink}"):
                _ledger(subject, subject.history, sink, view, findings)


def _ledger(subject: Subject, history: History, sink: str, view: StoreView, findings: Findings) -> None:
    """Compare a ledger with the earlier decisions, which it must have, and with the newest one, which bounds it."""
    now = subject.history_now
    known = positions_of(history.latest_finalized)
    highest = now.latest.checkpoint if now is not None and now.latest is not None else 0
    origin = find_topic(subject.config, subject.name).topic_id
    try:
        require_own(named_ledger(sink), origin, view.origin)
        require_in_step(named_ledger(sink), view.ledger, ledger_of(known, sink), highest)
    except Halt as error:
        what, _, choices = str(error).partition("\n")
        findings.add("stores", what, whose=f"the ledger of sink {sink}", do=choices.strip() or "as it says")


def check_sources(subject: Subject, findings: Findings) -> None:
    """Ask the servers of sources that keep something for them, as the log with captured changes."""
    for node in subject.graph.sources if subject.graph is not None else ():
        if not isinstance(node.source, SplitSource):
            continue
        offsets = subject.newest.offsets if subject.newest is not None else ()
        what = f"the server of source {node.id}"
        try:
            state, found = node.source.examine([at for at in offsets if at.source == node.id])
        except (UserError, Halt) as error:
            findings.not_checked(what, str(error), failed=True)
            continue
        if state:
            findings.checked.append(f"{what}, {state}")
        for finding in found:
            level = NOTE if finding.is_note else PROBLEM
            findings.add("inputs", finding.what, whose=what.removeprefix("the "), do=finding.do, level=level)


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
    _silence(subject, topics, findings)


def _silence(subject: Subject, topics: Topics, findings: Findings) -> None:
    """Name the partitions without records that results by event time wait for, while the pipeline runs."""
    manifests = subject.history.retained if subject.history is not None and subject.sign_of_life else ()
    if not manifests or all(offset.floor == NO_FLOOR for offset in manifests[-1].offsets):
        return

    def at_end(position: SourceOffset) -> bool:
        at = position.in_cluster
        return at is not None and topics.end_offsets(at.topic, committed=True).get(at.partition) == at.offset

    with findings.checking("partitions that event time waits for"):
        groups = subject.graph.time_groups if subject.graph is not None else {}
        for awaited in awaited_partitions(manifests, at_end, groups):
            findings.add(
                "inputs", awaited.text(subject.now_ms), level=NOTE,
                do="give its EventTime an idle= shorter than that, or let its producer send: docs/event-time.md, "
                "Choosing disorder and idle",
            )  # fmt: skip


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


def check_blocks(subject: Subject, findings: Findings, *, deep: bool) -> None:
    """Look at indexes and places; if *deep*, read every block and compare it with its SHA-256."""
    history, newest = subject.history, subject.newest
    if history is None or newest is None:
        return
    what = "all blocks" if deep else "indexes of blocks, and orphans after the last checkpoint"
    with findings.checking(what):
        topic = find_topic(subject.config, subject.name)
        with closing(Storages(subject.config, topic)) as storages:
            blocks = survey(storages, history, deep=deep)
            damaged = _damaged_blocks(storages, blocks, history) if deep else {}
            _damage(subject, storages, blocks, damaged, findings)
            _orphans(subject, newest, blocks, findings)
            for storage, why in blocks.unreachable.items():
                findings.not_checked(f"what the pipeline has left in {storage}", why)
            for place in (place for scanned in blocks.scanned.values() for place in scanned.unreadable):
                findings.add(
                    "blocks", f"{place} cannot be read", whose="the checkpoint topic's",
                    do="look at the disks of the brokers; blocks that lie there cannot be removed",
                )  # fmt: skip
            if not deep:
                why = f"{counted(len(blocks.claimed), 'block')}: --deep reads them all"
                findings.not_checked("the bytes of blocks, and orphans before the last checkpoint", why)


def _damaged_blocks(storages: Storages, blocks: BlockSurvey, history: History) -> dict[BlockRef, str]:
    """The damaged blocks, each with its damage."""
    damaged = dict[BlockRef, str]()
    for storage in history.storages:
        retained = (manifest for manifest in history.retained if manifest.storage == storage)
        needed = (blocks.references[manifest.checkpoint] for manifest in retained)
        refs = {ref for refs in needed if not isinstance(refs, str) for ref in refs}
        damaged |= damaged_among(refs, storages.of(storage))
    return damaged


def _damage(
    subject: Subject, storages: Storages, blocks: BlockSurvey, damaged: dict[BlockRef, str], findings: Findings
) -> None:
    """Report damaged checkpoints, unless they have expired meanwhile."""
    if not blocks.damaged and not damaged:
        return
    now = subject.history_now
    assert now is not None  # it was read before
    for checkpoint, why in blocks.damaged.items():
        if checkpoint in now.manifests:
            _report(subject, now, [checkpoint], why, findings)
    if damaged:
        needed = needed_blocks(storages, now, now.retained)
        for ref, why in damaged.items():
            needing = [number for number, refs in needed.items() if not isinstance(refs, str) and ref in refs]
            if needing:
                _report(subject, now, sorted(needing), why, findings)


def _report(subject: Subject, history: History, checkpoints: list[int], why: str, findings: Findings) -> None:
    newest = history.latest is not None and history.latest.checkpoint in checkpoints
    numbers = ", ".join(map(str, checkpoints))
    storage = history.manifests[checkpoints[-1]].storage
    what, disks = (storage, "its disks") if storage else ("the topic", "the disks of the brokers")
    savepoints = [number for number in checkpoints if number in history.savepoints]
    ends = " ".join(when_given_up(subject.name, number) for number in savepoints)
    ends = ends or "it goes when the checkpoint expires"
    findings.add(
        "blocks", f"Damaged in {storage or subject.checkpoint_topic}: {why}",
        whose=f"checkpoint {numbers}, the newest among them: no run can go on from it" if newest
        else f"checkpoint {numbers}: nothing can be restored from it, and a run does without",
        do=f"restore {what} from a replica or a backup, or `exactlyonce reset {subject.name}`; look at {disks}"
        if newest else f"look at {disks}; {ends[0].lower()}{ends[1:]}",
    )  # fmt: skip


def _orphans(subject: Subject, newest: Manifest, blocks: BlockSurvey, findings: Findings) -> None:
    """Report orphans. A running pipeline's blocks after its last checkpoint belong to the next one."""
    if blocks.damaged:
        findings.not_checked("orphans", "which blocks a damaged checkpoint stands on is not known")
        return
    after, before = list[BlockRef](), list[BlockRef]()
    for storage, ref in blocks.unclaimed:
        key = BlockKey.parse(ref.key)
        if key is not None and storage == TOPIC and ref.offset < blocks.first_places[ref.partition]:
            before += [ref] if key.checkpoint <= newest.checkpoint else []
        else:
            after.append(ref)
    if after and not subject.sign_of_life:
        findings.add(
            "blocks", f"{_counted(after)} of no checkpoint: orphans of a run that was ended in the middle", level=NOTE,
            whose=_writers(after), do=f"nothing: the next run of {subject.name} drops them",
        )  # fmt: skip
    if before:
        findings.add(
            "blocks", f"{_counted(before)} of no checkpoint, where no run looks for orphans any more: they stay, and "
            f"only take room", level=PROBLEM, whose=_writers(before),
            do="report it as a defect of exactlyonce; nothing else is affected",
        )  # fmt: skip


def _counted(refs: list[BlockRef]) -> str:
    return f"{counted(len(refs), 'block')} ({shown_bytes(sum(ref.size for ref in refs))})"


def _writers(refs: list[BlockRef]) -> str:
    keys = [key for ref in refs if (key := BlockKey.parse(ref.key)) is not None]
    attempts = sorted({(key.incarnation, key.attempt) for key in keys})
    operators = ", ".join(sorted({key.operator for key in keys}))
    writers = ", ".join(f"incarnation {incarnation} attempt {attempt}" for incarnation, attempt in attempts)
    return f"{operators} of this pipeline, written by {writers}"


def check_decisions(subject: Subject, findings: Findings) -> None:
    resources, topic = subject.resources, subject.checkpoint_topic
    if resources.topic is None:
        gone = bool(resources.transactions)
        findings.add(
            "decisions",
            f"There is no topic {topic}, " + ("though the brokers know transactions of the pipeline: it was deleted"
            if gone else "for the pipeline has not run yet"),
            level=PROBLEM if gone else NOTE,
            do=f"restore the topic from a replica or a backup, or `exactlyonce reset {subject.name}`" if gone
            else "nothing: the first run makes it",
        )  # fmt: skip
        return
    if subject.history is None:
        findings.add(
            "decisions", f"{topic} cannot be read as a log of decisions: {resources.unreadable}",
            whose="the checkpoint topic's", do="as it says; transactions, inputs and blocks are not compared with it",
        )  # fmt: skip
        return
    findings.checked.append(f"decisions in {topic}")
    _failure(subject, subject.history, findings)
    _damaged_decisions(subject, subject.history, findings)
    if subject.history.unfinalized is not None:
        _unfinalized(subject, subject.history, subject.history.unfinalized, findings)


def _failure(subject: Subject, history: History, findings: Findings) -> None:
    """Report why the last run ended, if it failed and none has begun since."""
    newest = history.newest_incarnation
    if newest is None or not newest.exit_code:
        return
    ago = shown_duration(max(0, subject.now_ms - newest.heartbeat_ms))
    skip = f", or leave the record out: `exactlyonce run ... --skip {newest.skip}`" if newest.skip else ""
    findings.add(
        "decisions", f"The last run has failed with code {newest.exit_code}, {ago} ago: {newest.failure.rstrip('.')}",
        whose=f"incarnation {newest.incarnation}, process {newest.process} on {newest.host}",
        do=f"as it says, and run the pipeline again{skip}",
    )  # fmt: skip


def _damaged_decisions(subject: Subject, history: History, findings: Findings) -> None:
    fatal = ""
    try:
        history.halt_if_damaged()
    except Halt as error:
        fatal = str(error)
    for key, why in history.damaged.items():
        findings.add(
            "decisions", f"{subject.checkpoint_topic}[0] is damaged at {key}: {why}",
            whose=fatal or "an older decision, which a run does without",
            do="restore the topic from a replica or a backup, and look at the disks of the brokers" if fatal
            else "look at the disks of the brokers; it goes when its checkpoint expires",
        )  # fmt: skip


def _unfinalized(subject: Subject, history: History, manifest: Manifest, findings: Findings) -> None:
    """Report a decided checkpoint with output that may not be visible yet."""
    decided = [output for output in subject.waiting or () if output.is_decided]
    count = len(unfinalized_committables(history)) + len(manifest.staged)
    runs, now_ms = subject.sign_of_life, subject.now_ms
    lefts = [left for output in decided if (left := output.left_ms(now_ms)) is not None]
    lost = [output for output in decided if output.state in (TxnState.COMPLETE_ABORT, TxnState.DEAD, GONE)]
    age = shown_duration(max(0, now_ms - manifest.completed_at_ms))
    what = (
        f"Checkpoint {manifest.checkpoint} was decided {age} ago and is not finalized: "
        f"{counted(manifest.records_committed, 'record')} may not be visible yet"
    )
    whose = f"{counted(count, 'committable')} of this pipeline"
    if lost:
        whose += f"; {len(lost)} of them aborted by the broker: {', '.join(output.name for output in lost)}"
    if lefts:
        whose += f"; the broker aborts the first in {shown_duration(min(lefts))}: then it has to be repaired"
    do, run = "run the pipeline, or commit it", [f"exactlyonce transactions commit {subject.named}"]
    if runs:
        run = []
        do = "nothing: the pipeline runs, and finishes it; if it has waited for long, its notes say for what"
    findings.add("decisions", what, whose=whose, do=do, run=run, level=NOTE if runs and not lost else PROBLEM)
