"""Replay repair: the records of a lost transaction, recomputed from the input and the checkpoint before it.

It is used where copy repair has no log to copy from. Invariants: only the lost partitions are produced, with the
outputs of the lost sink subtask, or of all subtasks where a partition has one transaction; nothing is committed here;
before the first record, the counts of every partition equal the broker's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Committable, Manifest, shares
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import Partitioner, partitioner, partitioner_in
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.recompute import (
    Recomputed,
    interval_of,
    partition_counts,
    recomputed,
    topic_of,
)
from exactlyonce.engines.bounded.stages import Submit, in_process
from exactlyonce.engines.bounded.unit.staging import RecomputedOutput
from exactlyonce.engines.bounded.workplace import THIS_MACHINE
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt, Unavailable, UserError, require
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.sinks.kafka.copying import write_again

Placed = Iterator[tuple[int, RecomputedOutput]]
"""Outputs, each with its partition."""


class ReplayRepair:
    """Answers the request `ReplayTransaction` for one incarnation, on one thread, with its own clients."""

    def __init__(
        self,
        loaded: Loaded,
        client: ClientConfig,
        transaction_timeout_ms: int,
        history: Callable[[], History],
        note: Callable[[str], None],
        submit: Callable[[ExitStack], Submit],
        staging: str | Path,
    ) -> None:
        """*submit* opens the runner of units, which `close` closes."""
        self._loaded, self._client = loaded, client
        self._timeout_ms, self._history, self._note = transaction_timeout_ms, history, note
        self._submit, self._staging = submit, staging
        self._stack = ExitStack()
        self._recomputed: tuple[int, Recomputed] | None = None

    def __call__(self, manifest: Manifest, lost: Committable, transactional_id: str) -> Committable | str:
        """The new committable, or the reason why there is none."""
        try:
            return self._replay(manifest, lost, self._outputs_of(manifest), transactional_id)
        except (BrokerUnavailable, Unavailable):
            raise
        except (UserError, Halt) as error:
            return str(error)

    def close(self) -> None:
        """Remove the staged files."""
        self._recomputed = None
        self._stack.close()

    def _outputs_of(self, manifest: Manifest) -> Recomputed:
        """The recomputed interval, which all its lost transactions share."""
        if self._recomputed is None or self._recomputed[0] != manifest.checkpoint:
            self.close()
            interval = interval_of(self._history(), manifest.checkpoint)
            self._note(
                f"replaying {interval.offsets} offsets, from checkpoint {interval.base.checkpoint} to "
                f"{manifest.checkpoint}, for output that was lost and cannot be copied"
            )
            submit = self._submit(self._stack)
            again = self._stack.enter_context(recomputed(self._loaded, self._client, interval, submit, self._staging))
            self._recomputed = manifest.checkpoint, again
        return self._recomputed[1]

    def _replay(
        self, manifest: Manifest, lost: Committable, again: Recomputed, transactional_id: str
    ) -> Committable | str:
        topic, _ = topic_of(manifest, lost.sink)
        found = lost_partitions if manifest.partitions_of(lost.sink) is not None else self._lost_share
        outputs = found(manifest, lost, topic, again)
        if isinstance(outputs, str):
            return outputs
        records = ((topic, output.alone(partition)) for partition, output in outputs)
        with closing(Transactions(self._client)) as transactions:
            return write_again(self._client, transactions, lost, transactional_id, self._timeout_ms, records)

    def _lost_share(self, manifest: Manifest, lost: Committable, topic: str, again: Recomputed) -> Placed | str:
        """The records of *lost* among the outputs of its sink subtask, or why it cannot be told which they are."""
        committables = manifest.committables
        whole = next(one for one in committables if one.transactional_id == lost.transactional_id)
        partition_of = partitioner(partitioner_in(manifest, lost.sink, self._client.settings))

        def share() -> Iterator[RecomputedOutput]:
            return share_of(manifest, whole, again.outputs(lost.sink, lost.subtask))

        problems: list[str] = []
        for partitions in partition_counts(self._client, self._history(), manifest, lost.sink):
            places = places_of(share(), partition_of, partitions)
            problem = mismatch(whole, lost, topic, places)
            if not problem:
                break
            problems.append(problem)
        else:
            return problems[0]
        wanted = sum(committable.records for committable in committables if committable.writer == lost.writer)
        replayed = again.count(lost.sink, lost.subtask)
        if replayed != wanted:
            return (
                f"the replay gives {replayed} records of sink {lost.sink!r} subtask {lost.subtask}, and there were "
                f"{wanted}: the pipeline does not do what it did then."
            )
        return placed(lost, topic, share(), places)


def lost_partitions(manifest: Manifest, lost: Committable, topic: str, again: Recomputed) -> Placed | str:
    """The outputs of the partitions of *lost*, or why they are not what they were: every partition must agree."""
    decided = Counter[int]()
    for committable in manifest.committables:
        if committable.sink == lost.sink:
            decided.update({written.partition: written.count for written in committable.written})
    replayed = Counter({partition: again.count(lost.sink, partition) for partition in again.lanes(lost.sink)})
    wrong = {p: replayed[p] for p in sorted({*decided, *replayed}) if replayed[p] != decided[p]}
    if wrong:
        return _other_counts(", ".join(f"{topic}[{p}] {count} instead of {decided[p]}" for p, count in wrong.items()))
    return (
        (written.partition, output)
        for written in lost.written
        for output in again.outputs(lost.sink, written.partition)
    )


def share_of(
    manifest: Manifest, committable: Committable, outputs: Iterable[RecomputedOutput]
) -> Iterator[RecomputedOutput]:
    """The share of *outputs*, all of a sink subtask, that *committable* holds."""
    share = shares(manifest.committables)[committable.transactional_id]
    return islice(outputs, share.start, share.stop)


def mismatch(whole: Committable, lost: Committable, topic: str, places: Iterable[int | None]) -> str:
    """The reason why outputs with these places cannot be *lost*, a part of *whole*; empty if they can."""
    by_place = Counter(places)
    at_random = by_place.pop(None, 0)
    replayed = {partition: count for partition, count in by_place.items() if partition is not None}
    counts = {partition: whole.counts.get((topic, partition), 0) for partition in replayed}
    wrong = {p: count for p, count in replayed.items() if count > counts[p]}
    room = sum(whole.counts.values()) - sum(replayed.values())
    if wrong or at_random != room:
        shown = ", ".join(f"{topic}[{p}] {count} instead of {counts[p]}" for p, count in sorted(wrong.items()))
        total = sum(replayed.values()) + at_random
        return _other_counts(shown or f"{total} records instead of {whole.records}")
    if at_random and lost.counts != whole.counts:
        return (
            f"{at_random} of the records have no key, so that the client distributed them at random, and only some "
            f"partitions have lost theirs: which records those were cannot be known."
        )
    return ""


def _other_counts(shown: str) -> str:
    return (
        f"the replay gives other counts ({shown}): the pipeline does not do what it did then, because its code has "
        f"changed, or it depends on time, chance or its surroundings."
    )


def placed(lost: Committable, topic: str, outputs: Iterable[RecomputedOutput], places: list[int | None]) -> Placed:
    """Each output for a partition of *lost*, with its partition; `mismatch` must be empty."""
    room = Counter({partition: count for (_, partition), count in lost.counts.items()})
    room.subtract(place for place in places if place is not None and (topic, place) in lost.counts)
    free = iter(sorted((+room).elements()))
    for place, output in zip(places, outputs, strict=True):
        partition = next(free, None) if place is None else place
        require(partition is not None, "there is room for every record that goes anywhere")
        assert partition is not None
        if (topic, partition) in lost.counts:
            yield partition, output


def places_of(outputs: Iterable[RecomputedOutput], partition_of: Partitioner, partitions: int) -> list[int | None]:
    """The partition that the sink, or else the writer's partitioner, chooses for each output; None: any."""
    return [output.place(partition_of, partitions) for output in outputs]


def where_replayed(
    repair: str, units: tuple[Submit, str | Path] | None
) -> tuple[Callable[[ExitStack], Submit], str | Path]:
    """The runner of a replay's units and their folder, by the option *repair*; *units*: of a Spark at hand."""
    if repair != "spark":
        return lambda stack: in_process, THIS_MACHINE
    if units is not None:
        return lambda stack: units[0], units[1]
    return _embedded_spark, THIS_MACHINE


def _embedded_spark(stack: ExitStack) -> Submit:
    from exactlyonce.engines.spark.session import runs_here, session
    from exactlyonce.engines.spark.submit import submit_to

    spark = stack.enter_context(session(None, {}, "exactlyonce repair"))
    if not runs_here(spark):
        raise ConfigError(
            "Output is to be computed again on Spark, whose executors are not on this machine: they need a place for "
            "files that all of them see. Run `exactlyonce catch-up --repair spark --staging URL`, which goes on from "
            "there."
        )
    return submit_to(spark)
