"""`exactlyonce savepoint`, of a pipeline that does not run: which checkpoint is exported."""

from __future__ import annotations

import msgspec
import pytest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest
from exactlyonce.cli.commands.savepoint import _newest
from exactlyonce.cli.main import parser
from exactlyonce.pipeline.errors import ConfigError

OF_THE_TOPIC = ["savepoint", "totals"]
EXPORTED = [*OF_THE_TOPIC, "--to", "file:///backups"]


def history(*, finalized: int) -> History:
    """Checkpoints 0 and 1, of which those up to *finalized* are."""
    first = Manifest(
        pipeline="totals", checkpoint=0, incarnation=1, attempt=0, kind="initial", base=0, previous=0,
        triggered_at_ms=0, completed_at_ms=0, fingerprint="", max_parallelism=128, parallelism=1, block_partitions=5,
        block_end_offsets=(0,) * 5, written_bytes=0, offsets=(), operators=(), order_logs=(), committables=(), sinks=(),
    )  # fmt: skip
    found = History("totals")
    for number in (0, 1):
        found.manifests[number] = msgspec.structs.replace(first, checkpoint=number)
        if number <= finalized:
            found.finalized[number] = Finalized(number, 1, 0, ())
    return found


def test_only_what_is_finalized_is_exported() -> None:
    """Of a checkpoint that is decided and not known to be committed it is said what finishes it."""
    assert _newest(history(finalized=1), parser().parse_args(EXPORTED)).checkpoint == 1
    with pytest.raises(
        ConfigError, match=r"Checkpoint 1 of totals is decided.*`exactlyonce transactions commit totals`"
    ):
        _newest(history(finalized=0), parser().parse_args(EXPORTED))


@pytest.mark.parametrize("line", [OF_THE_TOPIC, [*EXPORTED, "--stop"], [*OF_THE_TOPIC, "--stop"]], ids=" ".join)
def test_nobody_takes_one(line: list[str]) -> None:
    """One that is to be kept, or to end a run, is refused with what the next run goes on from."""
    with pytest.raises(ConfigError, match=r"totals does not run.* goes on from checkpoint 1\."):
        _newest(history(finalized=1), parser().parse_args(line))
