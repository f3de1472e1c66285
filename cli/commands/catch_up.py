"""`exactlyonce catch-up`: goes on from the last checkpoint on Spark, as `backfill` does from nothing."""

from __future__ import annotations

import argparse

from exactlyonce.cli.arguments import Parser, set_command
from exactlyonce.cli.commands.backfill import USAGE, add_arguments, work
from exactlyonce.cli.spark_arguments import SPARK_TEXT

_EXAMPLES = f"""\
Go on from the last checkpoint of a pipeline on Spark, to the end of its topics or to
what --to names, and end with a checkpoint; with --follow, until Ctrl-C: then small chunks
run in this process, unless --on spark is given.

examples:
  exactlyonce catch-up orders:pipeline
  exactlyonce catch-up orders:pipeline --follow --parallelism 8

{SPARK_TEXT}"""


def add(parser: Parser) -> None:
    set_command(parser, USAGE, _EXAMPLES, catch_up)
    add_arguments(parser)
    parser.set_defaults(no_output=False)
    parser.add_argument("--follow", action="store_true", help="go on with new records, until it is stopped")


def catch_up(args: argparse.Namespace) -> int:
    """Continue from the last checkpoint."""
    return work(args, follow=args.follow, from_nothing=False)
