"""Rows: crashes and faults around a checkpoint, the required outcome of each, and the tests that show it.

Cells of the matrix show a row if a process dies, stops or fails at a failpoint, or a request is lost or late; other
tests show the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossing import LAKES, SHAPES, SINKS, STREAM, TIMED
from kafka_proxy import END_TXN, PRODUCE, Fate

ALIGNED, UNALIGNED = MODES = ("aligned", "unaligned")
"""Whether barriers wait behind records, or overtake them."""
ON_DRIVER, ON_SPARK = "driver", "spark"
"""Where bounded work computes, which has no barriers."""
WITH_A_STORE = ("postgres", "both")
WITH_KAFKA = ("kafka", "both")


@dataclass(frozen=True, kw_only=True)
class Way:
    sinks: tuple[str, ...] = SINKS
    shapes: tuple[str, ...] = SHAPES
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class AtFailpoint(Way):
    """A process meets a failpoint, and dies, stops or fails there."""

    point: str
    nth: int = 2
    """The number of the hit; some come once in the life of a process."""
    actions: tuple[str, ...] = ("kill", "stop", "raise")

    @property
    def name(self) -> str:
        return self.point

    @property
    def in_coordinator(self) -> bool:
        return self.point.startswith(("coordinator-", "savepoint-")) or self.point in COMMITTING


@dataclass(frozen=True)
class Crash(AtFailpoint):
    """Of a run that goes on by itself, or by another run."""

    slow: bool = False
    """Whether records take longer behind the shuffle, so that some are on their way at every checkpoint."""
    crowd: int = 0
    """So many users have an event at one time: more than a firing gives in one slice, in each of two workers."""


@dataclass(frozen=True, kw_only=True)
class FromSavepoint(AtFailpoint):
    """Of a run that begins from a savepoint."""

    nth: int = 1
    modes: tuple[str, ...] = (ALIGNED,)


@dataclass(frozen=True, kw_only=True)
class TakenOver(AtFailpoint):
    """Of a leader, while a standby waits."""

    modes: tuple[str, ...] = (ALIGNED,)


@dataclass(frozen=True, kw_only=True)
class Bounded(AtFailpoint):
    """Of a backfill, which goes on by the same command; a run goes on from its end."""

    actions: tuple[str, ...] = ("kill", "raise")
    sinks: tuple[str, ...] = ("kafka",)
    modes: tuple[str, ...] = (ON_DRIVER,)


@dataclass(frozen=True, kw_only=True)
class Streamed(AtFailpoint):
    """Of a query of Spark that writes to a streaming sink, which its checkpoint location lets go on."""

    nth: int = 1
    """Each batch has processes of its own."""
    actions: tuple[str, ...] = ("kill", "stop")
    shapes: tuple[str, ...] = (STREAM,)
    modes: tuple[str, ...] = (ON_SPARK,)


COMMITTING = ("store-committing", "store-committed")
"""Failpoints of stores which the coordinator meets."""


@dataclass(frozen=True)
class Request(Way):
    what: str
    api: int
    holding: str
    """Text that its bytes hold; NAME stands for the pipeline's."""
    lacking: str | None = None
    fates: tuple[Fate, ...] = (Fate.REQUEST_LOST, Fate.ANSWER_LOST)

    @property
    def name(self) -> str:
        return self.what

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(each.value for each in self.fates)


ANY_FATE = tuple(Fate)
COORDINATOR_ID = "eo:NAME:coordinator"


@dataclass(frozen=True)
class Row:
    number: int
    fault: str
    required: str
    ways: tuple[AtFailpoint | Request, ...] = ()
    tests: tuple[str, ...] = ()
    """Files of tests, or tests in them, that show it where no way does, or more than the ways do."""


@dataclass(frozen=True)
class Promise:
    text: str
    rows: tuple[int, ...] = ()
    """Rows in whose cells it is asked for; none: in those of every row."""
    sinks: tuple[str, ...] = (*SINKS, *LAKES)
    of_cells: str = ""
    """The part of it that cells ask for, where that is not the whole."""


CHANGES, SHARED, MARIA, SLOW = (
    f"tests/connectors/changes/test_{name}.py" for name in ("changes", "shared_slot", "maria_changes", "slow_reader")
)
EVENT_TIME = tuple(f"tests/engines/test_{name}_runs.py" for name in ("windowed", "joined", "timer"))
BOUNDED_STEPS = (
    ("unit-computed", 2), ("publication-flushed", 1), ("advance-computed", 2), ("advance-published", 2),
    ("coordinator-decided", 2), ("coordinator-committed", 2),
)  # fmt: skip
STREAMED = ("kafka", "postgres", *LAKES)
KILLS = "tests/change_kills/test_some_kills.py"
"""Tests of captured changes."""

ROWS = (
    Row(1, "the barrier is on its way", "it is aborted; its number is not used again; the job goes on",
        (Crash("coordinator-triggered"),),
        ("tests/engines/test_kill_matrix.py",)),
    Row(2, "Sn is noted, and the barrier in some channels only", "restart from n-1, open transactions aborted",
        (Crash("worker-barrier"),),
        ("tests/engines/test_kill_matrix.py",)),
    Row(3, "a subtask dies when its inputs are aligned", "n is aborted; nothing is dropped or reordered",
        (Crash("worker-aligned"),),
        ("tests/engines/test_kill_matrix.py",)),
    Row(4, "a barrier in a cycle", "restart from n-1; records going round are counted once",
        (Crash("unaligned-captured", nth=1, shapes=("cycle",)),), ("tests/engines/test_loops.py",)),
    Row(5, "after the synchronous part, and while blocks are written", "n is aborted; orphans go",
        (Crash("worker-frozen"), Crash("worker-blocks"), Crash("unaligned-overtaken", modes=(UNALIGNED,)),
         Crash("unaligned-captured", modes=(UNALIGNED,), slow=True)), ("tests/engines/test_orphan_blocks.py",)),
    Row(6, "whether a block was written is unknown", "it is asked again, or n is aborted; never acknowledged blindly",
        (Request("a block", PRODUCE, "NAME.checkpoints", lacking=COORDINATOR_ID),),
        ("tests/connectors/kafka/checkpoint_topic/test_blocks.py",)),
    Row(7, "the sinks have flushed, the acknowledgement is not sent", "what is open is aborted; nothing is visible",
        (Crash("worker-flushed"),),
        ("tests/engines/test_kill_matrix.py",)),
    Row(8, "a flush with a delivery error", "the transaction is not used; no silent acknowledgement",
        (Request("output", PRODUCE, "NAME-totals", sinks=WITH_KAFKA),), ("tests/sinks/kafka/test_writer.py",)),
    Row(9, "all is acknowledged, nothing is decided", "restart from n-1; what is open is aborted",
        (Crash("worker-acknowledged"),),
        ("tests/engines/test_kill_matrix.py", "tests/checkpoint/test_decision_steps.py")),
    Row(10, "whether the manifest was written is unknown", "the next incarnation reads what is true",
        (Crash("coordinator-checked"), Request("the decision", END_TXN, COORDINATOR_ID, fates=ANY_FATE)),
        ("tests/connectors/kafka/checkpoint_topic/test_unknown.py",)),
    Row(11, "two coordinators", "the older is fenced, and ends",
        (Crash("coordinator-opened", nth=1), Crash("coordinator-swept", nth=1)),
        ("tests/engines/test_zombies.py::test_a_zombie_coordinator",)),
    Row(12, "the manifest is durable, nothing is committed", "committed by the next incarnation",
        (Crash("coordinator-decided"),),
        ("tests/engines/test_kill_matrix.py", "tests/checkpoint/test_decision_steps.py")),
    Row(13, "some sinks are committed", "the others are, too",
        (Crash("store-committing", sinks=WITH_A_STORE), Crash("store-committed", sinks=WITH_A_STORE)),
        ("tests/engines/test_delivery.py", "tests/checkpoint/test_decision_steps.py")),
    Row(14, "the answer to a commit is lost", "it is asked again",
        (Request("a commit", END_TXN, "eo:NAME:totals", fates=(Fate.REQUEST_LOST, Fate.ANSWER_LOST, Fate.ANSWER_LATE),
                 sinks=WITH_KAFKA),),
        ("tests/connectors/kafka/test_transactions.py", "tests/checkpoint/transactions/test_commit.py")),
    Row(15, "a commit arrives late, behind later transactions", "it ends none but its own",
        (Request("a late commit", END_TXN, "eo:NAME:totals", fates=(Fate.LATE,), sinks=WITH_KAFKA),),
        ("tests/connectors/kafka/checkpoint_topic/test_log_requests.py::test_an_end_that_arrives_late",)),
    Row(16, "the coordinator of a transaction moves or loads", "it is looked for again; the outcome is the same",
        tests=("tests/connectors/kafka/test_transactions_with_faults.py",)),
    Row(17, "the broker ends a transaction before the decision", "n fails, and is done again",
        tests=("tests/connectors/kafka/test_transactions_with_faults.py::test_commit_after_the_brokers_timeout",
               "tests/checkpoint/test_decision_check.py")),
    Row(18, "the broker ends a transaction behind the decision", "it is copied, or the run halts and says what is lost",
        tests=("tests/engines/test_copy_repair.py", "tests/checkpoint/test_decision.py")),
    Row(19, "one sink is committed, another was ended by the broker", "that one alone is repaired",
        tests=("tests/engines/test_copy_repair.py::test_one_of_four_is_lost",)),
    Row(20, "committed, but not marked as finalized", "asked again, without effect",
        (Crash("coordinator-committed", sinks=WITH_KAFKA),),
        ("tests/engines/test_kill_matrix.py",)),
    Row(21, "during clean-up", "done again; what is referred to stays",
        (Crash("coordinator-finalized"),), ("tests/checkpoint/test_retention.py",)),
    Row(22, "a zombie worker wakes", "nothing of it is visible", (Crash("worker-finalized"),),
        ("tests/engines/test_zombies.py::test_a_zombie_worker",)),
    Row(23, "a zombie's session in PostgreSQL wakes", "it commits nothing that stays",
        tests=("tests/sinks/postgres/test_schedules.py",)),
    Row(24, "brokers restart", "the job goes on", tests=("tests/engines/test_broker_faults.py",)),
    Row(25, "a log was truncated", "the run halts; no silent reset",
        tests=("tests/engines/test_input_topics.py::test_a_log_that_was_truncated_and_grew_again",)),
    Row(26, "retention has taken input", "the run stops, and names the gap",
        tests=("tests/engines/test_bad_input.py::test_input_that_retention_has_taken",)),
    Row(27, "an input topic is deleted or made anew", "the run halts",
        tests=("tests/engines/test_input_topics.py",)),
    Row(28, "an input topic gets partitions", "read from offset 0, from the next checkpoint on",
        tests=("tests/engines/test_added_partitions.py",)),
    Row(29, "the checkpoint topic gets partitions", "the number is frozen in the manifest",
        tests=("tests/connectors/kafka/checkpoint_topic/test_log_reader.py",)),
    Row(30, "compaction while state is restored", "a block that is referred to stays",
        tests=("tests/connectors/kafka/checkpoint_topic/test_blocks.py",)),
    Row(31, "the checkpoint topic is not compacted", "refused at the start",
        tests=("tests/engines/test_bad_input.py::test_a_checkpoint_topic_that_is_not_compacted",)),
    Row(32, "blocks or manifests are damaged", "the run halts with choices; an older checkpoint is noted",
        tests=("tests/engines/test_damaged_topic.py", "tests/engines/test_damaged_rows.py",
               "tests/checkpoint/records/test_history.py")),
    Row(33, "state of another type or version", "refused, by operator and field",
        tests=("tests/state/test_state_type.py", "tests/cli/test_restoring.py::test_state_types_that_changed",
               "tests/cli/test_restoring.py::test_operators_that_changed")),
    Row(34, "another parallelism after an open checkpoint", "ids of subtasks that are gone are ended, too",
        (Crash("coordinator-checked", nth=3),), ("tests/engines/test_sweeping.py",)),
    Row(35, "a crash while state is restored", "nothing was opened; restored again",
        (Crash("worker-restored", nth=1),),
        ("tests/engines/test_kill_matrix.py",)),
    Row(36, "a disk is full", "n fails, nothing is acknowledged",
        tests=("tests/sinks/files/test_disk.py", "tests/sinks/kafka/test_deferred.py",
               "tests/checkpoint/test_declined.py",
               "tests/engines/test_state_backends.py::test_a_disk_that_is_full",
               "tests/connectors/blocks/test_local_folder.py::test_a_full_disk")),
    Row(37, "clocks jump, tokens expire", "no false timeout; authenticated anew",
        tests=("tests/testing/test_broker_model.py::test_a_jump_of_the_wall_clock_times_nothing_out",
               "tests/connectors/kafka/test_client_config_on_a_broker.py::test_sessions_that_end")),
    Row(38, "a right is taken away", "an error that names it", tests=("tests/test_docs_access.py",)),
    Row(39, "bounded work crashes, or meets a live job", "done again under ids of its own; refused beside a live one",
        tests=("tests/bounded/test_kills.py", "tests/bounded/test_catch_up.py::test_a_running_pipeline_is_left_alone")),
    Row(40, "the broker has forgotten a producer", "as where it ended the transaction",
        tests=("tests/checkpoint/transactions/test_commit.py",)),
    Row(41, "a producer id comes to its last epoch", "another one; ids stay unique",
        tests=("tests/connectors/kafka/test_transactions.py::test_the_last_epochs",
               "tests/connectors/kafka/checkpoint_topic/test_log_requests.py::test_the_last_epoch_of_a_producer_id")),
    Row(42, "a kill between a page of a table and the changes beside it", "it goes on at its page; each row is once",
        tests=(f"{CHANGES}::test_pages_beside_writers",
               f"{CHANGES}::test_a_page_that_was_not_whole_is_followed_by_the_next",
               f"{CHANGES}::test_a_commit_that_is_streamed_before_it_is_visible",
               f"{MARIA}::test_maria_pages_beside_writers", KILLS)),
    Row(43, "a kill within an open transaction of captured changes", "the others of its changes come, each once",
        tests=("tests/stores/test_captured_changes.py::test_a_kill_within_a_transaction",
               f"{CHANGES}::test_an_open_transaction_is_read_on_where_the_reader_ended",
               f"{SHARED}::test_members_that_change_within_a_transaction",
               f"{MARIA}::test_maria_open_transaction_is_read_on_where_the_reader_ended")),
    Row(44, "finalized, and the slot is not told", "the checkpoint says where to go on; no change comes twice",
        tests=("tests/stores/test_captured_changes.py::test_a_slot_that_was_not_told_of_a_finalized_checkpoint",
               f"{CHANGES}::test_the_server_forgets_only_what_is_finalized")),
    Row(45, "the stream of changes ends, or its server dies", "begun again at the position, once a server is there",
        tests=(f"{CHANGES}::test_a_walsender_that_ends_and_a_server_that_starts_again",
               f"{SLOW}::test_a_stream_that_is_lost_again_and_again_within_a_transaction",
               f"{MARIA}::test_maria_stream_that_ends", f"{MARIA}::test_maria_server_that_is_killed_beside_writers",
               KILLS)),
    Row(46, "a standby takes over from a captured server", "it goes on, or the run halts if that lacks what was read",
        tests=(f"{CHANGES}::test_another_timeline", f"{CHANGES}::test_another_database_cluster",
               f"{MARIA}::test_maria_failover", KILLS)),
    Row(47, "the slot is ahead of the checkpoint, gone, or lost", "the run halts with choices; no silent gap",
        tests=(f"{CHANGES}::test_what_would_lose_changes_stops", f"{MARIA}::test_maria_binlog_that_is_gone")),
    Row(48, "a table is added while a transaction that wrote to it is open", "its pages wait for that, and have it",
        tests=(f"{SHARED}::test_a_table_that_is_added_later",
               f"{MARIA}::test_maria_tables_share_the_stream_and_one_that_is_added_begins_with_its_rows")),
    Row(49, "a sink blocks while a large transaction comes", "the stream lasts, and goes on; a batch is in memory",
        tests=(SLOW,)),
    Row(50, "results of event time are due, and some are given", "each comes once, with exactly its records",
        (Crash("timed-firing", nth=1, crowd=6_000, shapes=TIMED, sinks=("kafka",)),
         Crash("timed-fired", shapes=TIMED, sinks=("kafka",))),
        EVENT_TIME),
    Row(51, "windows, sessions, joins and timers are open", "they are restored; each result comes once",
        (*(Crash(point, shapes=TIMED, sinks=("kafka",)) for point in ("worker-frozen", "coordinator-decided")),
         Crash("worker-restored", nth=1, shapes=TIMED, sinks=("kafka",))),
        EVENT_TIME),
    Row(52, "a commit to a lake's table", "all rows of the checkpoint are in one snapshot, once",
        tuple(Crash(point, shapes=("chain",), sinks=LAKES)
              for point in ("coordinator-decided", "store-committing", "store-committed")),
        ("tests/sinks/lake/test_lake_runs.py",)),
    Row(53, "a run begins from a savepoint with open windows", "the same command begins again from it",
        (FromSavepoint("savepoint-written", shapes=TIMED, sinks=("kafka",)),
         FromSavepoint("coordinator-swept", shapes=TIMED, sinks=("kafka",))),
        ("tests/cli/test_restoring.py", "tests/cli/test_moving.py")),
    Row(54, "a standby waits, and the leader ends", "it takes over; the leader is fenced if it wakes",
        tuple(TakenOver(point, shapes=("chain", "windows"), sinks=("kafka",))
              for point in ("coordinator-decided", "coordinator-committed"))),
    Row(55, "bounded work is computed, or published", "the same command goes on, then a run",
        (*(Bounded(point, nth=nth, shapes=("chain", "windows")) for point, nth in BOUNDED_STEPS),
         *(Bounded(point, nth=1, actions=("kill",), shapes=("chain", "windows"), modes=(ON_SPARK,))
           for point in ("unit-computed", "advance-published"))),
        ("tests/bounded/test_kills.py",)),
    Row(56, "a batch of Spark's streaming sink is written, decided or committed", "the query goes on; each row is once",
        (Streamed("worker-flushed", sinks=STREAMED), Streamed("coordinator-decided", sinks=("kafka",)),
         Streamed("store-committing", sinks=STREAMED[1:]), Streamed("coordinator-finalized", sinks=STREAMED)),
        ("tests/spark/test_sink_kills.py",)),
)  # fmt: skip

PROMISES = (
    Promise("a checkpoint's state reflects exactly the records before its barriers", (1, 2, 3, 4, 5, 51)),
    Promise("nothing of a checkpoint is visible before it is decided"),
    Promise(
        "everything of a decided checkpoint becomes visible, however often processes die", (12, 13, 14, 20, 52, 54)
    ),
    Promise(
        "all rows of a checkpoint are in one snapshot of an Iceberg table, or in one version of a Delta table", (52,)
    ),
    Promise(
        "bounded work publishes what its units have computed, also if they stage it in S3 or HDFS", (55,),
        of_cells="staged in a folder of the machine",
    ),
    Promise("a process that was replaced changes nothing", (11, 15, 22, 54)),
    Promise(
        "a final window has exactly the records that a few lines of SQL find for it, in a run, in a backfill, and "
        "computed again",
        (50, 51, 53),
        of_cells="in a run, as plain Python finds them",
    ),
    Promise("what is needed is never dropped, what is not is"),
    Promise("all sinks of a pipeline agree", sinks=("both",)),
)  # fmt: skip
"""Those that cells show."""
