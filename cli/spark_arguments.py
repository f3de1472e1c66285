"""The options of the commands that use Spark, the executors that they configure, and the line of their progress.

Invariant: PySpark is imported, and Java looked for, only when such a command runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli.arguments import add_cluster, add_settings, given, pair
from exactlyonce.cli.text import show_event, show_from_handler
from exactlyonce.engines import events
from exactlyonce.engines.options import BOUNDED_CHECKPOINT, BOUNDED_RUN, Restoration, RunOptions
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.settings import declared
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest
    from exactlyonce.engines.bounded.advance import Advanced
    from exactlyonce.engines.bounded.stages import Executors

NOTHING_COMPARED = 10
"""The exit code of an audit or a diff that had nothing to compare."""
AUTO, DRIVER, SPARK = "auto", "driver", "spark"
DRIVER_RECORDS_MAX = 500_000
"""One process is done with so many records before Spark has started."""
_OF_SPARK = {"master": "--master", "spark_conf": "--spark-conf", "spark_log": "--spark-log"}
SPARK_TEXT = """\
Small work runs in this process, and says so: see --on. Spark runs embedded on this machine
unless --master, spark-submit or the program's own session says otherwise. On a cluster,
--staging names a folder that all executors see, or a place in HDFS or S3, and the executors
need this package: docs/spark-cluster.md.
"""


def add_spark(parser: argparse.ArgumentParser, *, parallelism: bool = True) -> None:
    """The options of Spark; *parallelism*: the command may choose it."""
    group = parser.add_argument_group("spark")
    group.add_argument(
        "--on",
        choices=(AUTO, DRIVER, SPARK),
        default=AUTO,
        help=f"where the work runs: in this process (driver), on Spark, or by its size (auto, the default): in this "
        f"process up to {DRIVER_RECORDS_MAX:,} records, unless a Spark is named",
    )
    group.add_argument(
        "--master",
        metavar="URL",
        help="Spark's master (default: that of spark-submit, or of the program's own session; else local[*,4])",
    )
    group.add_argument(
        "--spark-conf",
        metavar="NAME=VALUE",
        type=pair,
        action="append",
        default=[],
        help="a setting of Spark; may be repeated",
    )
    group.add_argument(
        "--staging",
        metavar="URL",
        help="a folder, hdfs://host:port/folder or s3://bucket/prefix for the files between stages (default for a "
        "local master: a temporary folder)",
    )
    group.add_argument(
        "--spark-log",
        metavar="FILE",
        type=Path,
        help="a file for the stderr of Spark and its JVM (default: dropped)",
    )
    if parallelism:
        stages = replace(
            declared(RunOptions)["parallelism"].setting, help="units of each stage", default="Spark's cores"
        )
        add_settings(group, replace(declared(RunOptions)["parallelism"], setting=stages))


def add_replaying(parser: argparse.ArgumentParser) -> None:
    """The options of a command that computes intervals again, at the parallelism of their checkpoints."""
    add_spark(parser, parallelism=False)
    add_cluster(parser)
    add_json(parser)


def add_leading(parser: argparse.ArgumentParser) -> None:
    """The options of a command that writes checkpoints, and the options of the cluster."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--take-over", action="store_true", help="even if an instance seems to be running")
    run, checkpoint = declared(RunOptions), declared(CheckpointSettings)
    add_settings(group, *(checkpoint[name] for name in BOUNDED_CHECKPOINT))
    add_settings(group, *(run[name] for name in BOUNDED_RUN))
    add_cluster(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="the result as one line of JSON on stdout; stderr has lines of JSON, too",
    )


def leading_options(args: argparse.Namespace) -> RunOptions:
    """The checked options of a command that writes checkpoints; their secrets are redacted from now on."""
    from exactlyonce.engines.configuration import options_from

    options = options_from(given(args, RunOptions, Restoration, CheckpointSettings))
    args.redact = options.client.redact
    options.client.check()
    return options


@contextmanager
def executors(
    args: argparse.Namespace, name: str, records: int | None, progress: LineOfProgress
) -> Iterator[Executors]:
    """This process, or the executors of a Spark session, for work that reads about so many *records*.

    None: their number is unknown. *progress* is told of the choice, and of each stage on Spark.
    """
    if _on_spark(args, records, progress):
        with _spark(args, name, progress) as where:
            yield where
    else:
        from exactlyonce.engines.bounded.stages import Executors, in_process
        from exactlyonce.engines.bounded.workplace import THIS_MACHINE, usable_staging

        yield Executors(in_process, usable_staging(args.staging or THIS_MACHINE), lambda: 1)


def _on_spark(args: argparse.Namespace, records: int | None, progress: LineOfProgress) -> bool:
    """Whether the work goes to Spark. A Spark that the user has named gets it, whatever its size."""
    from exactlyonce.engines.spark.session import is_chosen

    named = [option for field, option in _OF_SPARK.items() if getattr(args, field)]
    if args.on == DRIVER and named:
        raise ConfigError(f"--on driver starts no Spark, so {' and '.join(named)} cannot be used: leave one out.")
    if args.on != AUTO:
        return bool(args.on == SPARK)
    if records is None or records > DRIVER_RECORDS_MAX or named or is_chosen():
        return True
    progress.note(
        f"{counted(records, 'record')} at most are to be read: the work runs in this process, without Spark; --on "
        f"spark changes that"
    )
    return False


@contextmanager
def _spark(args: argparse.Namespace, name: str, progress: LineOfProgress) -> Iterator[Executors]:
    from exactlyonce.engines.bounded.workplace import usable_staging
    from exactlyonce.engines.spark.session import is_local, require_master, session
    from exactlyonce.engines.spark.submit import executors_of, require_staging

    if args.master is not None:
        require_master(args.master)
        if args.staging is None and not is_local(args.master):
            require_staging(args.master)
    staging = args.staging and usable_staging(args.staging)  # before Spark is started
    if sys.stderr.isatty() and not args.json:
        print("starting Spark ...", end="\r", file=sys.stderr, flush=True)
    with session(args.master, dict(args.spark_conf), f"exactlyonce {name}", args.spark_log) as spark:
        yield executors_of(spark, staging, progress.units)


class LineOfProgress:
    """A `CatchUpProgress`: in a terminal one line, written again and again; else, or with *json*, lines of JSON."""

    def __init__(self, pipeline: str, *, json: bool) -> None:
        self._pipeline = pipeline
        self._in_terminal = sys.stderr.isatty() and not json
        self._began_s = 0.0
        self._total = self._done = self._records = 0
        self._stage = ""

    def note(self, text: str) -> None:
        if self._in_terminal:
            self._erase()
            print(text, file=sys.stderr)
        else:
            show_event(events.note(self._pipeline, text))

    def note_from_handler(self, text: str) -> None:
        show_from_handler(f"\r\x1b[K{text}" if self._in_terminal else json.dumps(events.note(self._pipeline, text)))

    def began(self, manifest: Manifest, offsets: int) -> None:
        self._total, self._done, self._records = offsets, 0, 0
        self._began_s = time.monotonic()  # not before: Spark starts slowly, and --follow pauses
        if not self._in_terminal:
            self._event("started", checkpoint=manifest.checkpoint, offsets=offsets)
        self._show()

    def units(self, stage: str, done: int, units: int) -> None:
        """Show the units of a stage, as `engines.bounded.stages.UnitsDone`."""
        self._stage = f"{stage}, {done:,} of {counted(units, 'unit')}"
        self._show()

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self._done += offsets
        self._records += advanced.records
        if not self._in_terminal:
            self._event(
                "checkpoint",
                checkpoint=advanced.manifest.checkpoint,
                records_in=advanced.records,
                skipped=sum(partition.count for partition in advanced.skipped),
                records_committed=advanced.records_out,
                work_ms=advanced.elapsed_ms,
            )
        self._show()

    def passed(self, offsets: int) -> None:
        """Count *offsets* as done."""
        self._done += offsets
        self._show()

    def close(self) -> None:
        self._erase()

    def _event(self, kind: str, /, **fields: Any) -> None:
        show_event(events.event(kind, self._pipeline, **fields))

    def _show(self) -> None:
        if not self._in_terminal or not self._total:
            return
        elapsed_s = time.monotonic() - self._began_s
        bar = "#" * (20 * self._done // self._total)
        line = f"[{bar:<20}] {self._done:,} of {self._total:,} offsets"
        if self._records and elapsed_s:
            left_ms = round(elapsed_s * 1000 * (self._total - self._done) / self._done) if self._done else 0
            line += f"  {self._records / elapsed_s:,.0f} records/s  {shown_duration(left_ms)} left"
        if self._stage:
            line += f"  {self._stage}"
        width = shutil.get_terminal_size().columns - 1
        print("\r\x1b[K" + line[:width], end="", file=sys.stderr, flush=True)

    def _erase(self) -> None:
        if self._in_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
