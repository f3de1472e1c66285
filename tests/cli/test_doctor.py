"""`exactlyonce doctor`: what it finds, whose it says it is, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from blank_manifest import blank_manifest
from confluent_kafka import Producer

from exactlyonce.checkpoint.block_storage import DamagedBlock, Scanned
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, SourceOffset, TopicInfo
from exactlyonce.checkpoint.requests import ProducerState, TransactionState
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli.commands.doctor import as_text
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import TopicFacts, Topics
from exactlyonce.engines import pipeline_resources
from exactlyonce.engines.blocks import block_storage, references
from exactlyonce.engines.pending_output import StagedOutput, WaitingOutput
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.sinks.committer import StoreView
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.views.checkpoints import BlockSurvey
from exactlyonce.views.doctor import checks as doctor_checks
from exactlyonce.views.doctor import examination
from exactlyonce.views.doctor import readers as doctor_readers
from exactlyonce.views.doctor.checks import RightsCheck, check_inputs
from exactlyonce.views.doctor.examination import examine, resources_of, topic_facts
from exactlyonce.views.doctor.findings import NOTE, PROBLEM, Diagnosis, Findings
from exactlyonce.views.doctor.readers import ReadersCheck
from exactlyonce.views.rights import TOPIC, Right
from tests.cli.conftest import Orders, wait_until

"""After so long without a heartbeat, a pipeline counts as dead: in these tests (see `orders`) in LIMIT_S."""
NOWHERE = ClientConfig({"bootstrap.servers": "127.0.0.1:1"})


def examined(orders: Orders, *, later_ms: int = 0, deep: bool = False, older_than_ms: int = 60_000) -> Findings:
    now_ms, settings = SystemClock().now_ms() + later_ms, CheckpointSettings()
    resources = resources_of(orders.config, orders.name, None)
    _, found = examine(orders.config, resources, None, settings, now_ms=now_ms, older_than_ms=older_than_ms, deep=deep)
    return found


def about(found: Findings, kind: str) -> list[Diagnosis]:
    return [each for each in found.diagnoses if each.about == kind]


def test_where_nothing_is_wrong(orders: Orders) -> None:
    orders.command.refused(f"no topic {orders.name}.checkpoints", "doctor", orders.name)
    never = orders.command("doctor", "orders:pipeline", "--json").json
    assert [each["level"] for each in never["findings"]] == [NOTE]
    assert f"readers of {orders.name}-orders" in never["checked"]
    assert f"rights on topic {orders.name}-totals" in [each["what"] for each in never["not_checked"]]
    orders.ran()
    ended = orders.command.done("doctor", orders.name)
    assert f"readers of {orders.name}-totals" in ended.said
    assert "not checked  the bytes of blocks" in ended.out
    assert ended.out.splitlines()[-1].startswith(f"{orders.name}: nothing is wrong; ")
    deep = orders.command("doctor", "orders:pipeline", "--deep", "--json").json
    assert (deep["problems"], deep["findings"], deep["not_checked"], deep["running"]) == (0, [], [], None)
    assert "all blocks" in deep["checked"]


def test_what_a_dead_run_has_left(orders: Orders) -> None:
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    orders.killed_at("coordinator-checked")
    found = examined(orders)
    problem, decision = about(found, "readers")
    assert (problem.level, "of this pipeline, decided by no checkpoint" in problem.whose) == (PROBLEM, True)
    assert f"eo:{orders.name}:coordinator, the coordinator of this pipeline" in decision.whose
    assert problem.run == (f"exactlyonce transactions abort {orders.name}",)
    assert "the broker aborts it in" in problem.whose
    (orphans,) = about(found, "blocks")
    assert (orphans.level, "of no checkpoint" in orphans.what) == (NOTE, True)
    orders.killed_at("coordinator-decided")
    found = examined(orders)
    (decided,) = about(found, "decisions")
    assert "700 records may not be visible yet" in decided.what
    assert "the broker aborts the first in" in decided.whose
    assert decided.run == (f"exactlyonce transactions commit {orders.name}",)
    assert [f"decided in checkpoint {1}" in each.whose for each in about(found, "readers")] == [True]
    orders.command.done("transactions", "commit", orders.name, "--take-over")
    wait_until(lambda: examined(orders).problems == 0)  # the markers come behind the answer


@pytest.mark.exhaustive
def test_beside_a_run(orders: Orders) -> None:
    arguments = ("--checkpoint-interval", "50ms", "--num-retained", "1")
    with orders.running(*arguments) as run:
        for _ in range(3):
            orders.write(700)
            found = examined(orders, deep=True)
            assert [each for each in found.diagnoses if each.level == PROBLEM] == []
        assert run.stop() == 0
    assert '"kind": "final"' in run.said
    assert orders.history().incarnation_latest == 1


def test_a_wrong_policy_and_damaged_blocks(orders: Orders) -> None:
    orders.ran()
    topic = f"{orders.name}.checkpoints"
    orders.kafka.configure_topic(topic, cleanup_policy="compact,delete")
    block = state_block(orders)
    orders.kafka.delete_records(topic, {block.partition: block.offset + 1})
    found = examined(orders)
    (policy,) = about(found, "settings")
    assert "cleanup.policy is compact,delete, must be = compact" in policy.what
    assert policy.run[0].endswith("--add-config cleanup.policy=compact")
    assert about(found, "blocks") == []
    orders.kafka.configure_topic(topic, cleanup_policy="compact")
    (damaged,) = (each for each in about(examined(orders, deep=True), "blocks") if block.key in each.what)
    assert damaged.whose.startswith("checkpoint 1, the newest among them")
    orders.kafka.configure_topic(topic, cleanup_policy="compact,delete")
    orders.kafka.delete_records(topic, dict.fromkeys(range(1, 5), -1))
    orders.kafka.configure_topic(topic, cleanup_policy="compact")
    ended = orders.command("doctor", orders.name)
    assert (ended.code, f"Damaged in {topic}" in ended.out) == (1, True)


def state_block(orders: Orders) -> BlockRef:
    """A block of state that lies before the indexes of its partition, so that its own stays where it goes."""
    newest = orders.newest()
    with closing(block_storage(orders.config, find_topic(orders.config, orders.name), "")) as storage:
        refs = references(newest, storage)
    indexes = {ref for each in newest.operators for parts in each.index for ref in parts}
    (block,) = (ref for ref in refs - indexes if ref.key.startswith("block/1/1/totals/"))
    assert all(ref.offset > block.offset for ref in indexes if ref.partition == block.partition)
    return block


@pytest.mark.exhaustive
def test_settings_of_the_run_against_the_brokers(orders: Orders) -> None:
    orders.ran()
    ended = orders.command("doctor", orders.name, "--checkpoint-timeout", "20m")
    assert ended.code == 1
    assert "transaction.max.timeout.ms" in ended.out.replace("\n", " ")


@pytest.mark.exhaustive
def test_input_that_retention_has_taken(orders: Orders) -> None:
    orders.ran()
    orders.kafka.delete_records(f"{orders.name}-orders", {0: 1})
    (older,) = about(examined(orders), "inputs")
    assert f"{orders.name}-orders no longer has the input after checkpoint 0" in older.what
    orders.write(700)
    orders.kafka.delete_records(f"{orders.name}-orders", {0: -1, 1: -1})
    found = about(examined(orders), "inputs")
    (gone,) = found
    assert "retention has taken offsets" in gone.what


def test_unread_input_that_retention_is_about_to_take(orders: Orders) -> None:
    orders.ran()
    topic, week_ms = f"{orders.name}-orders", 7 * 24 * 60 * 60 * 1000
    orders.kafka.configure_topic(topic, retention_ms=week_ms)
    orders.kafka.add_partitions(topic, 3)
    assert about(examined(orders), "inputs") == []
    producer, written_ms = Producer({"bootstrap.servers": orders.kafka.bootstrap_servers}), SystemClock().now_ms()
    producer.produce(topic, b"{}", partition=2, timestamp=written_ms - week_ms + 60 * 60 * 1000)
    assert producer.flush(LIMIT_S) == 0
    (soon,) = about(examined(orders), "inputs")
    (over,) = about(examined(orders, later_ms=2 * 60 * 60 * 1000), "inputs")
    assert soon.what == f"1 offset of {topic} still to be read: retention may take the first within 42h 00m"
    assert (over.what.endswith("at any time"), over.level) == (True, PROBLEM)


class Brokers:
    """Two partitions of topic "t" whose readers are held at offsets 5 and 7 of 9; *owner* is the id's state."""

    def __init__(self, owner: TransactionState | None) -> None:
        self.owner = owner

    def end_offsets(self, topic: str, *, committed: bool) -> dict[int, int]:
        return {0: 5, 1: 7} if committed else {0: 9, 1: 9}

    def producers(self, _: Any) -> Sequence[ProducerState]:
        return [ProducerState("t", number, 3, 1, 0, 1_000, offset) for number, offset in ((0, 5), (1, 7))]

    def named(self, producer_id: int) -> str | None:
        return self.owner.transactional_id if self.owner else None

    def describe(self, names: Sequence[str]) -> dict[str, TransactionState | None]:
        return dict.fromkeys(names, self.owner)


def held(owner: TransactionState | None, waiting: Sequence[WaitingOutput] | None = ()) -> Diagnosis:
    """Findings if *owner* holds readers back an hour after it began."""
    found = Findings()
    brokers: Any = Brokers(owner)
    subject: Any = SimpleNamespace(
        topics=["t"], name="p", named="p", now_ms=3_601_000, waiting=waiting, sign_of_life="",
        config=NOWHERE,
    )  # fmt: skip
    ReadersCheck(subject, brokers, brokers, found, 60_000).run()
    (only,) = found.diagnoses
    assert (only.level, only.what) == (
        PROBLEM,
        "Readers of t[0,1] are held back: they do not get to see 6 offsets",
    ) or "lost" in only.what
    return only


def test_whose_a_transaction_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_readers, "MARKERS_LOST_AFTER_MS", 0)
    by_hand = tuple(
        f"kafka-transactions --bootstrap-server 127.0.0.1:1 abort --topic t --partition {partition} "
        f"--start-offset {offset}"
        for partition, offset in ((0, 5), (1, 7))
    )
    hanging = held(None)
    assert (hanging.run, "producer id 3, epoch 1" in hanging.whose) == (by_hand, True)
    assert "open for 1h 00m" in hanging.whose
    complete = TransactionState("billing", "CompleteAbort", 3, 2, 60_000, -1, ())
    assert (held(complete).run, "lost its markers" in held(complete).do) == (by_hand, True)
    other = held(TransactionState("eo:q:out:0:1.0:0", "Ongoing", 3, 1, 900_000, 1_000, (("t", 0),)))
    assert other.run == ("exactlyonce doctor q", "exactlyonce transactions abort q")
    ours = held(TransactionState("eo:p:out:0:1.0:0", "CompleteCommit", 3, 2, 900_000, -1, ()))
    assert ("it has lost its markers" in ours.what, "run the pipeline" in ours.do) == (True, True)


def block(offset: int, checkpoint: int) -> BlockRef:
    key = BlockKey(incarnation=1, checkpoint=checkpoint, operator="sum", key_group=0, part=offset, attempt=0, nonce="a")
    return BlockRef(1, offset, str(key), 10, b"")


def test_orphans_that_no_run_looks_for() -> None:
    """Blocks of no checkpoint are a note where the next run looks for them, and a problem before that place."""
    found = Findings()
    refs = [block(3, 1), block(4, 2), block(9, 3)]
    seen = BlockSurvey({2: frozenset({refs[1]})}, {"": Scanned(tuple(refs), (0, 10))}, (0, 5))
    subject: Any = SimpleNamespace(name="p", sign_of_life="")
    newest: Any = SimpleNamespace(checkpoint=2)
    doctor_checks._orphans(subject, newest, seen, found)
    assert [(each.level, each.what[:20]) for each in found.diagnoses] == [
        (NOTE, "1 block (10 B) of no"),
        (PROBLEM, "1 block (10 B) of no"),
    ]
    assert "incarnation 1 attempt 0" in found.diagnoses[0].whose


def test_stores_that_are_at_odds(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = cast(Any, History("p")), cast(Any, History("p"))
    before.manifests[4] = after.manifests[4] = SimpleNamespace(checkpoint=4, ledger=(("behind", 0, 4),))
    after.manifests[5] = SimpleNamespace(checkpoint=5, ledger=(("behind", 0, 4),))
    before.finalized[4] = after.finalized[4] = True
    monkeypatch.setattr(doctor_checks, "find_topic", lambda *_: TopicInfo("p.checkpoints", "id", 2, 1))
    found = Findings()
    views = {
        "refuses": StoreView(problem="there is no table."),
        "bucket": StoreView(risk="a lifecycle rule aborts uploads after 7 days"),
        "lake": StoreView(growth="has 1,001 snapshots: expire old ones"),
        "behind": StoreView(origin="id", ledger={0: 3}),
        "ahead": StoreView(origin="id", ledger={0: 6}),
        "foreign": StoreView(origin="other"),
        "meanwhile": StoreView(origin="id", ledger={0: 5}),
    }
    subject: Any = SimpleNamespace(
        graph=object(), staged=StagedOutput(views=views), history=before, history_now=after, newest=before.latest,
        name="p", sign_of_life="it runs", config=NOWHERE,
    )  # fmt: skip
    doctor_checks.check_stores(subject, found)
    assert [each.what[:44] for each in found.diagnoses] == [
        "The store of sink refuses does not take what",
        "Waiting output of sink bucket may be removed",
        "The table of sink lake has 1,001 snapshots: ",
        "The ledger of sink 'behind' has checkpoint 3",
        "The ledger of sink 'ahead' has checkpoint 6 ",
        "The ledger of sink 'foreign' was begun for a",
    ]
    assert [each.level for each in found.diagnoses] == [PROBLEM, NOTE, NOTE, PROBLEM, PROBLEM, PROBLEM]
    assert all("Choices:" in each.do for each in found.diagnoses[3:])


def test_what_may_be_a_cause_comes_before_its_effects() -> None:
    found = Findings()
    for kind, level in (("readers", PROBLEM), ("decisions", NOTE), ("stores", PROBLEM), ("rights", NOTE)):
        found.add(kind, f"{kind} are not as they should be", do="something", level=level)
    assert [each.about for each in found.in_order] == ["stores", "readers", "rights", "decisions"]
    assert next(as_text(found, 80)).startswith("problem: stores")


def test_what_could_not_be_looked_at() -> None:
    found = Findings()
    with found.checking("rights"):
        raise DamagedBlock("gone", block(1, 1))
    with found.checking("settings"):
        pass
    found.not_checked("bytes", "by --deep alone")
    assert found.unchecked == [("rights", "gone", True), ("bytes", "by --deep alone", False)]
    assert found.checked == ["settings"]
    lines = list(as_text(found, 80))
    assert (lines[0], lines[-1]) == ("failed       rights: gone", "not checked  bytes: by --deep alone")
    assert found.failed == 1


class Deaf(Topics):
    """Brokers that do not answer what they are asked about topic "b"; there is "a", and no "c"."""

    def __init__(self) -> None:
        """Nothing is connected."""

    def facts(self, name: str) -> TopicFacts | None:
        if name == "b":
            raise BrokerUnavailable("Asking for topic b failed: no broker answers.")
        operations = frozenset({"Read", "Write", "DescribeConfigs"})
        return TopicFacts(name, "id", (1,), (1,), operations) if name == "a" else None


def test_a_question_without_an_answer() -> None:
    found = Findings()
    facts = topic_facts(Deaf(), ["a", "b", "c"], found)
    assert list(facts) == ["a", "c"]
    subject: Any = SimpleNamespace(
        inputs=["a", "b", "c"], read_elsewhere={}, topics=["a", "b", "c"], newest=None, name="p"
    )
    check_inputs(subject, cast(Any, None), facts, found)
    assert [each.what for each in found.diagnoses] == ["Topic c is missing"]
    rights = RightsCheck(subject, cast(Any, None), facts, found)
    for topic in facts.keys() | {"b"}:
        rights._topic(Right(TOPIC, topic, ("Read",)))
    assert "rights on topic a" in found.checked
    assert {each.what: each.failed for each in found.unchecked} == {
        "topic b": True, "rights on topic b": True, "rights on topic c": False,
    }  # fmt: skip
    assert found.unchecked[0].why == "Asking for topic b failed: no broker answers."


def unanswered(*_: object) -> Any:
    raise BrokerUnavailable("no broker answers")


def test_traces_that_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unanswered question leaves the rest examined, with the log unread. Without any broker nothing is examined."""
    there = TopicInfo("p.checkpoints", "id", 2, 1)
    monkeypatch.setattr(pipeline_resources, "find", unanswered)
    monkeypatch.setattr(examination, "find_topic", lambda *_: there)
    resources = resources_of(NOWHERE, "p", None)
    assert (resources.topic, resources.history, resources.unreadable) == (there.name, None, "no broker answers")
    monkeypatch.setattr(examination, "find_topic", unanswered)
    with pytest.raises(BrokerUnavailable):
        resources_of(NOWHERE, "p", None)


def test_blocks_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """That check fails, and nothing is said of what it would have counted."""
    monkeypatch.setattr(doctor_checks, "find_topic", unanswered)
    found = Findings()
    subject: Any = SimpleNamespace(history=object(), newest=object(), name="p", config=NOWHERE)
    doctor_checks.check_blocks(subject, found, deep=False)
    assert [(each.why, each.failed) for each in found.unchecked] == [("no broker answers", True)]


def test_whose_transaction_it_is_where_no_decision_was_looked_at() -> None:
    ongoing = TransactionState("eo:p:out:0:1.0:0", "Ongoing", 3, 1, 900_000, 1_000, (("t", 0),))
    assert held(ongoing).run == ("exactlyonce transactions abort p",)
    unknown = held(ongoing, waiting=None)
    assert (unknown.run, unknown.do) == ((), "run the pipeline: it commits or aborts it")


def test_input_that_was_truncated() -> None:
    """The doctor says what a run says if a log ends before what was read of it, or in another leader epoch."""
    read = SourceOffset("s", "t", "id", 0, 10, leader_epoch=3)
    newest = blank_manifest(checkpoint=4, offsets=(read,))
    subject: Any = SimpleNamespace(
        inputs=["t"], read_elsewhere={}, newest=newest, history=None, name="p", resources=SimpleNamespace(is_sink=False)
    )
    facts = {"t": TopicFacts("t", "id", (1,), (1,), None)}
    for end, epoch_end, why in (
        (3, 10, "the topic ends at 3"),
        (20, 7, "what leader epoch 3 wrote there ends at offset 7"),
    ):
        topics: Any = SimpleNamespace(
            start_offsets=lambda topic: {0: 0},
            end_offsets=lambda topic, committed, end=end: {0: end},
            epoch_ends=lambda topic, epochs, epoch_end=epoch_end: {0: epoch_end},
        )
        found = Findings()
        check_inputs(subject, topics, facts, found)
        (lost,) = found.diagnoses
        assert f"has read t[0] up to offset 10, but {why}" in lost.what
        assert lost.do.startswith("restore it from a replica or backup")


def test_a_check_that_fails_beside_the_others(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.ran()
    silent, asked = f"{orders.name}-totals", Topics.facts

    def facts_of(self: Topics, name: str) -> TopicFacts | None:
        if name == silent:
            raise BrokerUnavailable(f"Asking for topic {name} failed: no broker answers.")
        return asked(self, name)

    monkeypatch.setattr(Topics, "facts", facts_of)
    ended = orders.command("doctor", orders.name)
    shown = ended.said
    assert ended.code == 1
    assert f"failed topic {silent}: Asking for topic {silent} failed: no broker answers." in shown
    assert f"rights on topic {orders.name}-orders" in shown
    assert f"{orders.name}: 2 checks failed, nothing else is known to be wrong; " in shown
    unchecked = orders.command("doctor", orders.name, "--json").json["not_checked"]
    failed = [each for each in unchecked if each["failed"]]
    assert [each["what"] for each in failed] == [f"topic {silent}", f"rights on topic {silent}"]
