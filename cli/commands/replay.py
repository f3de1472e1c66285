"""`exactlyonce replay`: what one checkpoint's interval puts out, computed again, to be counted or looked at."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from exactlyonce.cli.arguments import Commands, add_command, add_pipeline, client, loaded
from exactlyonce.cli.spark_arguments import SPARK_TEXT, add_replaying, replaying

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.replay.reproduce import Replayed

_EXAMPLES = f"""\
Compute the output of one checkpoint again: its interval of the input, on the state of
the checkpoint before, in the order of its order logs. Shows how many records each sink
puts into each partition, beside how many it had; with --into, writes the records into
a topic of your choice, in one transaction. The pipeline is not disturbed. (A decided
checkpoint that has lost output is repaired by `exactlyonce run`: see its --repair.)

examples:
  exactlyonce replay orders:pipeline --checkpoint 121
  exactlyonce replay orders:pipeline --checkpoint 121 --into orders-again
  exactlyonce replay orders:pipeline --checkpoint 121 --in-process --json

{SPARK_TEXT}"""
DIFFERS = 1
"""The exit code of a replay that gives other counts than were decided."""


def add(commands: Commands) -> None:
    """The parser."""
    parser = add_command(commands, "replay", "MODULE:PIPELINE --checkpoint N [options]", "compute output again",
                         _EXAMPLES, replay)  # fmt: skip
    add_pipeline(parser)
    parser.add_argument("--checkpoint", metavar="N", type=int, required=True, help="whose interval is computed again")
    parser.add_argument("--into", metavar="TOPIC", help="a topic that gets the records; made if it is missing")
    parser.add_argument("--sink", metavar="ID", help="whose records, if the pipeline has more than one sink")
    add_replaying(parser)


def replay(args: argparse.Namespace) -> int:
    """Run it; 1 if the counts are not those of the checkpoint."""
    from exactlyonce.cli.spark_progress import LineOfProgress
    from exactlyonce.engines.bounded.replay.reproduce import Replay

    config = client(args)
    pipeline = loaded(args)
    name = pipeline.pipeline.name
    work = Replay(pipeline, config, args.checkpoint, into=args.into, sink=args.sink)
    progress = LineOfProgress(name, json=args.json)
    try:
        with replaying(args, name, progress.stage) as where:
            replayed = work.run(where, progress)
    finally:
        progress.close()
    if args.json:
        figures = {
            "pipeline": name, "checkpoint": args.checkpoint, "base": replayed.base, "records_in": replayed.records,
            "skipped": replayed.skipped, "agrees": replayed.agrees,
            "counts": [asdict(count) for count in replayed.counts], "into": args.into,
            "records_produced": replayed.produced,
        }  # fmt: skip
        print(json.dumps(figures), flush=True)
    else:
        print(*_text(args, replayed), sep="\n")
    return 0 if replayed.agrees else DIFFERS


def _text(args: argparse.Namespace, replayed: Replayed) -> Iterator[str]:
    from exactlyonce.cli.text import table
    from exactlyonce.pipeline.sizes import counted

    rows = [
        (each.sink, each.topic, "any" if each.partition is None else str(each.partition), str(each.replayed),
         "" if each.decided is None else str(each.decided))
        for each in replayed.counts
    ]  # fmt: skip
    if rows:
        yield from table(("sink", "topic", ">partition", ">replayed", ">decided"), rows)
    verdict = (
        "the counts are those that were decided" if replayed.agrees else "the counts are not those that were decided"
    )
    yield f"checkpoint {args.checkpoint}, {counted(replayed.records, 'record')} in: {verdict}."
    if args.into:
        yield f"{counted(replayed.produced, 'record')} written to {args.into}."
