"""`exactlyonce backfill` and `exactlyonce catch-up`: bounded work on Spark, up to stop offsets.

A catch-up goes on from a checkpoint; a backfill may also begin without one.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from exactlyonce.checkpoint.records.manifest import HISTORY
from exactlyonce.cli.arguments import Parser, add_pipeline, add_settings, loaded, named, set_command
from exactlyonce.cli.spark_arguments import (
    AUTO,
    SPARK,
    SPARK_TEXT,
    LineOfProgress,
    add_json,
    add_leading,
    add_spark,
    executors,
    leading_options,
)
from exactlyonce.engines.options import Restoration, RunOptions
from exactlyonce.pipeline.positions import LATEST, TO
from exactlyonce.pipeline.settings import declared

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.catch_up import Summary

_BACKFILL = f"""\
Compute a pipeline over the history of its topics on Spark, then end with a checkpoint
from which `exactlyonce run` goes on, at exactly the record after. A large history is
done in chunks, each a checkpoint of its own: after an interruption, the next run goes on
at the last one.

examples:
  exactlyonce backfill orders:pipeline
  exactlyonce backfill orders:pipeline --to 2026-11-01
  exactlyonce backfill orders:pipeline --no-output --to group:legacy-app
  exactlyonce backfill orders:pipeline --to '{{"orders": {{"0": 120000, "1": -1}}}}'
  exactlyonce backfill orders:pipeline --master spark://host:7077 --staging /shared/eo
  exactlyonce backfill orders:pipeline --from-savepoint s3://backups/order-totals-42-1f2e3d4c

{SPARK_TEXT}"""
USAGE = "MODULE:PIPELINE [options]"
STOPPING = "stopping after this checkpoint; ask again to stop at once, which loses nothing"


def add(parser: Parser) -> None:
    set_command(parser, USAGE, _BACKFILL, backfill)
    add_arguments(parser)
    parser.add_argument(
        "--no-output",
        action="store_true",
        help="compute state alone, and write dead letters only: output up to --to is another application's",
    )


def add_arguments(parser: Parser) -> None:
    add_pipeline(parser)
    parser.add_argument(
        "--to",
        metavar="WHERE",
        default=LATEST,
        help=f"where it ends, exclusive (default: latest): {TO}",
    )
    parser.add_argument(
        "--chunk-records",
        metavar="N",
        type=int,
        help="about how many records one checkpoint reads at most (default: a million for each unit, 5 million at "
        "least, as far as half of the free room for staging takes them)",
    )
    add_spark(parser)
    dropped = declared(RunOptions)["allow_dropped_fields"]
    add_settings(parser.add_argument_group("savepoints"), *declared(Restoration).values(), dropped)
    add_leading(parser)
    add_json(parser)


def backfill(args: argparse.Namespace) -> int:
    """Begin without a checkpoint, or continue an interrupted backfill."""
    return work(args, follow=False, from_nothing=True)


def work(args: argparse.Namespace, *, follow: bool, from_nothing: bool) -> int:
    from exactlyonce.engines.bounded.catch_up import CatchUp
    from exactlyonce.engines.configuration import parallelism_given
    from exactlyonce.engines.stop_signals import handling_stop_signals

    to, options = TO.read(args.to), leading_options(args)
    pipeline = loaded(args)
    name, began_s, stopping = pipeline.pipeline.name, time.monotonic(), threading.Event()
    progress = LineOfProgress(name, json=args.json)
    catching = CatchUp(
        loaded=pipeline, options=options, parallelism=parallelism_given(vars(args)), progress=progress,
        to=to, chunk_records=args.chunk_records, from_nothing=from_nothing, follow=follow,
        no_output=args.no_output, small_here=follow and args.on == AUTO, take_over=args.take_over,
        command_name=named(args), stopping=stopping,
    )  # fmt: skip
    catching.judge()
    with executors(args, name, None if follow or options.repair == SPARK else catching.records, progress) as where:
        catching.choose_parallelism(where)
        try:
            with handling_stop_signals(_handler(stopping, progress)):
                summary = catching.run(where)
        finally:
            progress.close()
        _sum_up(args, name, summary, time.monotonic() - began_s)
    return 0


def _handler(stopping: threading.Event, progress: LineOfProgress) -> Callable[[int, FrameType | None], None]:
    """A signal handler: the first signal asks for an end after this checkpoint, the second ends it at once."""

    def asked(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        progress.note_from_handler(STOPPING)

    return asked


def _sum_up(args: argparse.Namespace, name: str, summary: Summary, elapsed_s: float) -> None:
    if args.json:
        figures = {
            "pipeline": name, "checkpoint": summary.checkpoint, "checkpoints": summary.checkpoints,
            "records_in": summary.records, "skipped": summary.skipped_count, "records_out": summary.records_out,
            "parallelism": summary.parallelism, "work_ms": summary.work_ms, "elapsed_ms": round(elapsed_s * 1000),
            "offsets": summary.offsets, "skipped_records": [
                {"source": skips.source, "topic": skips.topic, "partition": skips.partition, "count": skips.count,
                 "offsets": [offset for offset, _ in skips.first]}
                for skips in summary.skipped.values()
            ],
        }  # fmt: skip
        print(json.dumps(figures), flush=True)
    elif summary.checkpoints:
        next_command = "the same command" if summary.manifest.kind == HISTORY else f"`exactlyonce run {named(args)}`"
        print(
            f"{name}: {summary.records:,} records read, {summary.records_out:,} written{_skipped(summary)}, up to "
            f"checkpoint {summary.checkpoint}; {next_command} goes on from there.",
            file=sys.stderr,
        )
    else:
        print(f"{name}: there was nothing to read after checkpoint {summary.checkpoint}.", file=sys.stderr)


def _skipped(summary: Summary) -> str:
    if not summary.skipped:
        return ""
    places = [
        f"{skips.topic}[{skips.partition}] {skips.count:,}, the first at {', '.join(str(at) for at, _ in skips.first)}"
        for skips in summary.skipped.values()
    ]
    return f", {summary.skipped_count:,} skipped because they do not decode ({'; '.join(places)})"
