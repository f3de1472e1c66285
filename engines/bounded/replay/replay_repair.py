"""Replay repair: what a lost transaction held, computed again from the input and the checkpoint before.

For where copy repair has nothing to copy from: the output log was compacted, or its records have expired. Invariants:
only the lost partitions of the lost sink subtask are produced, and nothing is committed here; before the first record
is produced, the counts of every partition are those that the broker had counted in the lost transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.copying import NOW, Outgoing, write_again
from exactlyonce.connectors.kafka.partitioning import partitioner
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.replay.recompute import Recomputed, interval_of, partition_counts, recomputed
from exactlyonce.engines.bounded.replay.sharing import (
    RecomputedOutput,
    flat,
    mismatch,
    placed,
    places_of,
    share_of,
    topic_of,
)
from exactlyonce.engines.bounded.submit import Submit, in_process
from exactlyonce.engines.bounded.workplace import THIS_MACHINE
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt, Unavailable, UserError
from exactlyonce.pipeline.loading import Loaded


class ReplayRepair:
    """Answers the request `ReplayTransaction` for one incarnation of a pipeline. Used by one thread, beside whoever
    leads: its clients are its own."""

    def __init__(
        self,
        loaded: Loaded,
        client: ClientConfig,
        transaction_timeout_ms: int,
        history: Callable[[], History],
        note: Callable[[str], None],
        submit: Callable[[ExitStack], Submit],
        staging: Path,
    ) -> None:
        """*submit* opens what runs the units, which the stack closes with this."""
        self._loaded, self._client = loaded, client
        self._timeout_ms, self._history, self._note = transaction_timeout_ms, history, note
        self._submit, self._staging = submit, staging
        self._stack = ExitStack()
        self._recomputed: tuple[int, Recomputed] | None = None

    def __call__(self, manifest: Manifest, lost: Committable, transactional_id: str) -> Committable | str:
        """The new committable, or why there is none."""
        try:
            return self._replay(manifest, lost, self._outputs_of(manifest), transactional_id)
        except (BrokerUnavailable, Unavailable):
            raise
        except (UserError, Halt) as error:
            return str(error)

    def close(self) -> None:
        """Remove what was staged."""
        self._recomputed = None
        self._stack.close()

    def _outputs_of(self, manifest: Manifest) -> Recomputed:
        """The interval is computed once, however many transactions of it were lost."""
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
        whole = next(each for each in manifest.committables if each.transactional_id == lost.transactional_id)
        topic, _ = topic_of(manifest, lost.sink)
        partition_of = partitioner(self._client.settings)

        def share() -> Iterator[RecomputedOutput]:
            return share_of(manifest, whole, flat(again.outputs(lost.sink, lost.subtask)))

        problems: list[str] = []
        for partitions in partition_counts(self._client, self._history(), manifest, lost.sink):
            places = places_of(share(), partition_of, partitions)
            problem = mismatch(whole, lost, topic, places)
            if not problem:
                break
            problems.append(problem)
        else:
            return problems[0]
        if problem := self._surplus(manifest, lost, again):
            return problem
        records = (
            Outgoing(topic, partition, output.key, output.value, output.headers, output.timestamp_ms or NOW)
            for partition, output in placed(lost, topic, share(), places)
        )
        with closing(Transactions(self._client)) as transactions:
            return write_again(self._client, transactions, lost, transactional_id, self._timeout_ms, records)

    def _surplus(self, manifest: Manifest, lost: Committable, again: Recomputed) -> str:
        """Why the whole output of the sink subtask is not that of its committables; empty if it is."""
        wanted = sum(each.records for each in manifest.committables if each.writer == lost.writer)
        file = again.files.get(lost.writer)
        found = 0 if file is None else file.file.records
        if found == wanted:
            return ""
        return (
            f"the replay gives {found} records of sink {lost.sink!r} subtask {lost.subtask}, and there were {wanted}: "
            f"the pipeline does not do what it did then."
        )


def where_replayed(repair: str, units: tuple[Submit, Path] | None) -> tuple[Callable[[ExitStack], Submit], Path]:
    """What runs the units of a replay and where they are staged, by the option *repair*; *units*: a Spark at hand."""
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
            "Output is to be computed again on Spark, whose executors are not on this machine: they need a folder that "
            "all of them see. Run `exactlyonce catch-up --repair spark --staging FOLDER`, which goes on from there."
        )
    return submit_to(spark)
