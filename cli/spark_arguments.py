"""The options of the commands that work with Spark, and a `Submit` made of them.

Invariant: PySpark is imported only when such a command runs, and Java is asked for only then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli.arguments import add_cluster, add_settings, given, pair
from exactlyonce.engines.options import Restoration, RunOptions
from exactlyonce.pipeline.settings import declared

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.submit import Executors

_CHECKPOINTING = ("num_retained", "incremental", "store_timeout_ms", "transaction_timeout_ms", "storage")
SPARK_TEXT = """\
Spark runs embedded on this machine unless --master, spark-submit or the program's own
session say otherwise; on a cluster --staging names a folder that all executors see, and
they need this package: docs/spark.md.
"""


def add_spark(parser: argparse.ArgumentParser, *, parallelism: bool = True) -> None:
    """The options that say where Spark runs and how; *parallelism*: the command may choose it."""
    group = parser.add_argument_group("spark")
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
        help="a setting of Spark, any number of them",
    )
    group.add_argument(
        "--staging",
        metavar="DIR",
        help="where stages leave files for each other (default, for a local master: a temporary folder)",
    )
    group.add_argument(
        "--spark-log",
        metavar="FILE",
        type=Path,
        help="a file for what Spark and its JVM write to stderr (default: it is dropped)",
    )
    if parallelism:
        stages = replace(
            declared(RunOptions)["parallelism"].setting, help="units of each stage", default="Spark's cores"
        )
        add_settings(group, replace(declared(RunOptions)["parallelism"], setting=stages))


def add_replaying(parser: argparse.ArgumentParser) -> None:
    """The options of a command that computes intervals again, whose parallelism is that of the checkpoints."""
    add_spark(parser, parallelism=False)
    parser.add_argument("--in-process", action="store_true", help="in this process, without Spark")
    add_cluster(parser)
    add_json(parser)


def add_leading(parser: argparse.ArgumentParser) -> None:
    """The options of a command that writes checkpoints, and those of the cluster."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--take-over", action="store_true", help="also from an instance that seems to be running")
    run, checkpoint = declared(RunOptions), declared(CheckpointSettings)
    add_settings(group, *(checkpoint[name] for name in _CHECKPOINTING))
    add_settings(group, *(run[name] for name in ("checkpoint_partitions", "accept_loss", "skip", "repair")))
    add_cluster(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option of a command that sums up what it did."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="what was done, as one line of JSON on stdout; stderr has lines of JSON, too",
    )


def leading_options(args: argparse.Namespace) -> RunOptions:
    """The options of a command that writes checkpoints; from here on *args* knows what to redact."""
    from exactlyonce.engines.configuration import options_from

    options = options_from(given(args, RunOptions, Restoration, CheckpointSettings))
    args.redact = options.client.redact
    options.client.check()
    return options


@contextmanager
def replaying(args: argparse.Namespace, name: str, started: Callable[[str, int], None]) -> Iterator[Executors]:
    """Where units of a command with the options of `add_replaying` run."""
    if args.in_process:
        from exactlyonce.engines.bounded.submit import Executors, in_process
        from exactlyonce.engines.bounded.workplace import THIS_MACHINE

        yield Executors(in_process, Path(args.staging or THIS_MACHINE), lambda: 1)
    else:
        with executors(args, name, started) as where:
            yield where


@contextmanager
def executors(args: argparse.Namespace, name: str, started: Callable[[str, int], None]) -> Iterator[Executors]:
    """A Spark session as the options say; *started* is told of each stage and how many units it has."""
    from exactlyonce.engines.spark.session import is_local, session
    from exactlyonce.engines.spark.submit import executors_of, require_staging

    if args.staging is None and args.master is not None and not is_local(args.master):
        require_staging(args.master)
    if sys.stderr.isatty() and not args.json:
        print("starting Spark ...", end="\r", file=sys.stderr, flush=True)
    with session(args.master, dict(args.spark_conf), f"exactlyonce {name}", args.spark_log) as spark:
        yield executors_of(spark, args.staging, started)
