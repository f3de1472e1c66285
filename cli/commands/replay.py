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
    from exactlyonce.checkpoint.records.manifest import Manifest
    from exactlyonce.engines.bounded.replay.reproduce import Count

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
    from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
    from exactlyonce.engines.bounded.replay.recompute import interval_of, recomputed
    from exactlyonce.engines.bounded.replay.reproduce import agree, counts, produce_into

    config = client(args)
    pipeline = loaded(args)
    name = pipeline.pipeline.name
    history = read_history(config.confluent(), name)
    interval = interval_of(history, args.checkpoint)
    manifest = interval.manifest
    sink = _sink(args, manifest) if args.into else ""
    progress, produced = LineOfProgress(name, json=args.json), 0
    try:
        with replaying(args, name, progress.stage) as (submit, staging):
            progress.began(manifest, interval.offsets)
            with recomputed(pipeline, config, interval, submit, staging) as again:
                found = counts(config, history, manifest, again)
                if args.into:
                    produced = produce_into(config, manifest, again, sink, args.into)
    finally:
        progress.close()
    same = agree(found)
    if args.json:
        figures = {
            "pipeline": name, "checkpoint": args.checkpoint, "base": interval.base.checkpoint,
            "records_in": again.records, "skipped": again.skipped, "agrees": same,
            "counts": [asdict(each) for each in found], "into": args.into, "records_produced": produced,
        }  # fmt: skip
        print(json.dumps(figures), flush=True)
    else:
        print(*_text(args, found, same, again.records, produced), sep="\n")
    return 0 if same else DIFFERS


def _sink(args: argparse.Namespace, manifest: Manifest) -> str:
    """The sink whose records are produced."""
    from exactlyonce.pipeline.errors import ConfigError

    ids = [sink for sink, _, _ in manifest.sinks]
    if args.sink is None and len(ids) == 1:
        return ids[0]
    if not ids:
        raise ConfigError("None of the pipeline's sinks writes to Kafka: there is nothing that --into could get.")
    if args.sink not in ids:
        raise ConfigError(f"Say whose records --into is to get: --sink with one of {', '.join(ids)}.")
    return str(args.sink)


def _text(args: argparse.Namespace, found: list[Count], same: bool, records: int, produced: int) -> Iterator[str]:
    from exactlyonce.cli.text import table
    from exactlyonce.pipeline.sizes import counted

    rows = [
        (each.sink, each.topic, "any" if each.partition is None else str(each.partition), str(each.replayed),
         "" if each.decided is None else str(each.decided))
        for each in found
    ]  # fmt: skip
    if rows:
        yield from table(("sink", "topic", ">partition", ">replayed", ">decided"), rows)
    verdict = "the counts are those that were decided" if same else "the counts are not those that were decided"
    yield f"checkpoint {args.checkpoint}, {counted(records, 'record')} in: {verdict}."
    if args.into:
        yield f"{counted(produced, 'record')} written to {args.into}."
