"""`exactlyonce replay`: computes the output of one checkpoint again, and counts or writes it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from exactlyonce.cli.arguments import Parser, add_pipeline, client, loaded, set_command
from exactlyonce.cli.spark_arguments import SPARK_TEXT, LineOfProgress, add_replaying, executors

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.reproduce import Replayed

_EXAMPLES = f"""\
Compute the output of one checkpoint again: its interval of the input, on the state of
the checkpoint before, in the order of its order logs. Compare the records of each sink
and partition with the decided counts. With --into, write the records to that topic, in
one transaction. A running pipeline is not disturbed. (`exactlyonce run` repairs a
decided checkpoint that has lost output: see its --repair.)

examples:
  exactlyonce replay orders:pipeline --checkpoint 121
  exactlyonce replay orders:pipeline --checkpoint 121 --into orders-again
  exactlyonce replay orders:pipeline --checkpoint 121 --on driver --json

{SPARK_TEXT}"""
DIFFERS = 1
"""The exit code if the counts differ from the decided ones."""


def add(parser: Parser) -> None:
    set_command(parser, "MODULE:PIPELINE --checkpoint N [options]", _EXAMPLES, replay)  # fmt: skip
    add_pipeline(parser)
    parser.add_argument("--checkpoint", metavar="N", type=int, required=True, help="the checkpoint to compute again")
    parser.add_argument("--into", metavar="TOPIC", help="a topic for the records; created if it is missing")
    parser.add_argument("--sink", metavar="ID", help="the sink, if the pipeline has more than one")
    add_replaying(parser)


def replay(args: argparse.Namespace) -> int:
    from exactlyonce.engines.bounded.reproduce import Replay

    config = client(args)
    pipeline = loaded(args)
    name = pipeline.pipeline.name
    work = Replay(pipeline, config, args.checkpoint, into=args.into, sink=args.sink)
    progress = LineOfProgress(name, json=args.json)
    try:
        with executors(args, name, work.offsets, progress) as where:
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
        (count.sink, count.topic, "any" if count.partition is None else str(count.partition), str(count.replayed),
         "" if count.decided is None else str(count.decided))
        for count in replayed.counts
    ]  # fmt: skip
    if rows:
        yield from table(("sink", "topic", ">partition", ">replayed", ">decided"), rows)
    yield replayed.verdict
    if args.into:
        yield f"{counted(replayed.produced, 'record')} written to {args.into}."
