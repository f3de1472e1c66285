"""The configuration of a leader, and the limits that it sets to late records and dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from exactlyonce.checkpoint.commits.stores import StagingSink
from exactlyonce.checkpoint.events import PendingCheckpoint
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest, RecordPlace
from exactlyonce.checkpoint.records.storage_url import TOPIC, described, setting_of
from exactlyonce.checkpoint.settings import DELETE
from exactlyonce.pipeline.dead_letters import DeadLetterLimits
from exactlyonce.pipeline.errors import ConfigError, RecordError
from exactlyonce.pipeline.names import setting


@dataclass(frozen=True, kw_only=True)
class LeaderConfig:
    """A pipeline, and the process that leads it: host, process, machine and cluster are filled in as it is opened."""

    pipeline: str
    transaction_timeout_ms: int
    fingerprint: str
    max_parallelism: int
    parallelism: int
    host: str = ""
    process: int = 0
    machine: str = ""
    """See `Incarnation.machine`."""
    cluster_id: str = ""
    transaction_version: int = 0
    accept_loss: int | None = None
    """The checkpoint whose lost output the user gives up."""
    attempt: int = 0
    """The first one."""
    staging: Mapping[str, StagingSink] = field(default_factory=dict)
    """The sinks that write to stores with a ledger."""
    store_timeout_ms: int = 0
    """How long to wait for such a store that does not answer."""
    storage: str = TOPIC
    """See `Manifest.storage`."""
    skips: tuple[RecordPlace, ...] = ()
    """The input records that the user has it leave out."""
    deletes: bool = False
    """Whether its checkpoints are deleted when it is cancelled."""
    bounded: bool = False
    without_output: bool = False
    """Whether its checkpoints are of history whose output is another application's."""
    dead_letter_limits: Mapping[str, DeadLetterLimits] = field(default_factory=dict)
    """By the id of the sink that dead letters go to."""
    max_late: float = 1.0
    """The largest share of its latest records that an operator may leave out as late; see `LateRecords`."""
    restores: str = ""
    """The origin of the savepoint to continue from, unless it has done so already; empty: none."""

    def fenced_below(self, incarnation: Incarnation) -> tuple[int, int]:
        """(incarnation, attempt) below which all transactional ids were fenced when *incarnation* began."""
        return incarnation.fenced_below, 0

    def filled(self, manifest: Manifest) -> Manifest:
        """*manifest* with the fields that only this kind of pipeline has."""
        return manifest

    def goes_on_from_savepoint(self, newest: Manifest | None) -> bool:
        """Whether to begin from a savepoint; not if *newest* shows that this has been done."""
        return bool(self.restores) and (newest is None or newest.origin != self.restores)

    def require_same_storage(self, newest: Manifest | None) -> None:
        """Raise ConfigError if the pipeline continues from *newest*, and its blocks are kept elsewhere.

        A run that begins from a savepoint writes it anew, so it needs no block of the former storage.
        """
        if newest is None or newest.storage == self.storage or self.goes_on_from_savepoint(newest):
            return
        number = str(newest.checkpoint) if newest.is_savepoint else "N"
        taken = "" if newest.is_savepoint else (
            f" take a savepoint N, by `exactlyonce savepoint {self.pipeline} --stop` while it runs as it did, then"
        )  # fmt: skip
        raise ConfigError(
            f"The checkpoints of {self.pipeline} are kept in {described(newest.storage)}, and this run was told to "
            f"keep them in {described(self.storage)}. Nothing was changed.\n"
            f"  To go on as before: --checkpoint-storage {setting_of(newest.storage)}\n"
            f"  To move them:{taken} `exactlyonce run PIPELINE --from-savepoint {number} --checkpoint-storage "
            f"{setting_of(self.storage)}`"
        )

    def require_not_condemned(self, history: History) -> None:
        """Raise ConfigError if a cancelled run has left its checkpoints to be deleted."""
        if history.condemned:
            raise ConfigError(
                f"The checkpoints of {self.pipeline} are to be deleted: its run was cancelled, with retention "
                f"{DELETE}. Nothing was changed. The next `exactlyonce run` deletes them first, and so does "
                f"`exactlyonce cancel {self.pipeline}`."
            )

    def topic_lost(self, topic: str, incarnation: int) -> str:
        """The text of the halt if *topic* is empty, but the broker knows of transactions of *incarnation*."""
        return (
            f"The checkpoint topic {topic} is empty, but transactions of incarnation {incarnation} of this pipeline "
            f"are known to the broker: the topic was deleted. Beginning anew would write all output again.\n"
            f"  Choices: restore the topic from a replica or backup and run again; or, if that is what you want, "
            f"`exactlyonce reset {self.pipeline}`."
        )


LATE_MIN = 100
"""So many late records are the fewest that may stop a job."""
LATE_SPAN = 10_000
"""So many records of an operator, at most, stand for all that came before a checkpoint."""


class LateRecords:
    """The late records that each operator left out, as a share of its latest records.

    All records before a checkpoint count as `LATE_SPAN` at most, so that the share is one of the latest also after
    months. Below `LATE_MIN` late records no share is too large.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._before: dict[str, tuple[int, int]] = {}
        """By operator, those left out and all, as acknowledged for the newest decided checkpoint of this attempt."""
        self._lately: dict[str, tuple[int, int]] = {}
        """Likewise, of the latest records up to that checkpoint: `LATE_SPAN` of all at most."""

    def begin_attempt(self) -> None:
        """Workers count from 0 again."""
        self._before = {}

    def check(self, plan: PendingCheckpoint) -> None:
        """Raise RecordError if an operator would have left out more than the share with *plan*."""
        for operator, (late, came) in self._with(self._counts(plan)).items():
            if late >= LATE_MIN and late > self._share * came:
                raise RecordError(
                    f"Operator {operator!r} leaves out {late:,} of its latest {came:,} records, since they are late: "
                    f"more than {setting('max_late')} {self._share:g} allows. The job has stopped before checkpoint "
                    f"{plan.checkpoint}; its records are read again. The lines above that begin with 'late' count "
                    f"them, and name some. If records of a partition are out of order, as those of several producers, "
                    f"raise disorder= of the source, or of with_time. If a record's time was ahead of all others, "
                    f"lower ahead=. If partitions were silent for longer than idle=, raise that. If a run before was "
                    f"drained (--drain), it has closed all windows up to its end. Give the operator late= to keep such "
                    f"records in an output, or let it leave them out with {setting('max_late')} 1. See "
                    f"docs/event-time.md.",
                    operator=operator,
                )

    def decided(self, plan: PendingCheckpoint) -> None:
        """The records of *plan* count as decided."""
        counts = self._counts(plan)
        self._lately = {
            operator: (late, came) if came < LATE_SPAN else (late * LATE_SPAN // came, LATE_SPAN)
            for operator, (late, came) in self._with(counts).items()
        }
        self._before = counts

    def _counts(self, plan: PendingCheckpoint) -> dict[str, tuple[int, int]]:
        late, came = Counter[str](), Counter[str]()
        for left_out in chain.from_iterable(ack.left_out for ack in plan.acks.values()):
            late[left_out.operator] += left_out.records
            came[left_out.operator] += left_out.came
        return {operator: (late[operator], came[operator]) for operator in came}

    def _with(self, counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """By operator, those of late and those at the barriers that gave *counts*."""
        nothing, sums = (0, 0), dict[str, tuple[int, int]]()
        for operator, (late, came) in counts.items():
            late_before, came_before = self._before.get(operator, nothing)
            late_lately, came_lately = self._lately.get(operator, nothing)
            sums[operator] = late_lately + late - late_before, came_lately + came - came_before
        return sums


class RecordLimits:
    """The limits of *config* to the records that are left out as late, or become dead letters."""

    def __init__(self, config: LeaderConfig) -> None:
        self.late = LateRecords(config.max_late)
        self._dead_letters = config.dead_letter_limits

    def check(self, plan: PendingCheckpoint, previous: Manifest | None) -> None:
        """Raise RecordError if *plan*, the checkpoint after *previous*, exceeds one of them."""
        self.late.check(plan)
        if not self._dead_letters:
            return
        begin = {} if previous is None else {(o.source, o.partition): o.offset for o in previous.offsets}
        ends = (offset for ack in plan.acks.values() for offset in ack.offsets)
        records = sum(end.offset - begin.get((end.source, end.partition), 0) for end in ends)
        records += 0 if previous is None else previous.records_in_flight
        letters = Counter[str]()
        for precommit in plan.precommits:
            letters[precommit.sink] += precommit.records
        for sink, limits in self._dead_letters.items():
            if limit := limits.exceeded(letters[sink], records):
                raise RecordError(
                    f"Checkpoint {plan.checkpoint} has {letters[sink]:,} dead letters for sink {sink!r}, more than "
                    f"{limit}. The job has stopped before it: none of them is written, and nothing is lost. The lines "
                    f"above that begin with 'dead letter' name the first. Fix the pipeline or the input, or raise the "
                    f"limit, then run again.",
                    operator=sink,
                )
