"""`exactlyonce diff`: computes the output of two versions of a pipeline over the same input, and compares it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from exactlyonce.cli.arguments import Parser, add_pipeline, at_least_one, client, loaded, set_command
from exactlyonce.cli.spark_arguments import NOTHING_COMPARED, SPARK_TEXT, LineOfProgress, add_replaying, executors
from exactlyonce.cli.text import printable, table
from exactlyonce.pipeline.positions import LATEST, TO

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.diff import DiffReport, SinkDiff
    from exactlyonce.engines.bounded.unit.comparison import ComparedOutput, KeyDifference

_EXAMPLES = f"""\
Compute the output of two versions of a pipeline over the same real input, and compare it key
by key: a test of a change before it runs. Both begin with the state of one checkpoint of the
pipeline, by default its newest savepoint, else the oldest checkpoint that is retained, and
read up to --to. Rows for stores are compared, too, by their key or their input record.
Nothing is written, and a running pipeline is not disturbed. Exit code 1 if outputs differ,
10 if there were none to compare.

examples:
  git show main:orders.py > orders_before.py
  exactlyonce diff orders_before:pipeline orders:pipeline
  exactlyonce diff orders_before:pipeline orders:pipeline --from 121 --to 2026-11-01T00:00:00Z
  exactlyonce diff orders_before:pipeline orders:pipeline --on driver --json

{SPARK_TEXT}"""
DIFFERS = 1
"""The exit code if outputs differ."""
_SHOWN = 20
_TEXT_LENGTH = 60


def add(parser: Parser) -> None:
    usage = "MODULE:OLD MODULE:NEW [--from N] [options]"
    set_command(parser, usage, _EXAMPLES, diff)
    add_pipeline(parser)
    parser.add_argument("new", metavar="MODULE:NEW", help="the other version, which gets the same --param")
    parser.add_argument("--from", dest="checkpoint", metavar="N", type=int, help="begin with the state of checkpoint N")
    parser.add_argument("--to", metavar="WHERE", default=LATEST, help=f"where the input ends (default: latest): {TO}")
    parser.add_argument(
        "--chunk-records", metavar="N", type=at_least_one,
        help="the most records that are computed at once (default: as for `exactlyonce backfill`)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", metavar="N", type=at_least_one, default=_SHOWN,
        help=f"the most differences of a sink (default: {_SHOWN})",
    )  # fmt: skip
    add_replaying(parser)


def diff(args: argparse.Namespace) -> int:
    from exactlyonce.engines.bounded.diff import Diff
    from exactlyonce.pipeline.loading import load

    config, to = client(args), TO.read(args.to)
    versions = loaded(args), load(args.new, dict(args.param))
    work = Diff(
        *versions, config, checkpoint=args.checkpoint, to=to, chunk_records=args.chunk_records, shown=args.limit
    )
    progress = LineOfProgress(work.name, json=args.json)
    try:
        with executors(args, work.name, 2 * work.offsets, progress) as where:
            report = work.run(where, progress)
    finally:
        progress.close()
    print(*([json.dumps(_figures(report))] if args.json else _text(report)), sep="\n", flush=True)
    if not report.is_judged:
        return NOTHING_COMPARED
    return 0 if report.agrees else DIFFERS


def _figures(report: DiffReport) -> dict[str, Any]:
    return {
        "pipeline": report.pipeline, "checkpoint": report.base, "records_in": report.records, "agrees": report.agrees,
        "sinks": [
            {
                "sink": sink.sink, "compared_by": sink.by, "old": sink.old, "new": sink.new, "keys": sink.keys,
                "differing": sink.differing,
                "differences": [
                    {
                        "key": printable(each.key), "place": each.place, "old": _output(each.old),
                        "new": _output(each.new),
                    }
                    for each in sink.differences
                ],
            }
            for sink in report.sinks
        ],
        "not_compared": report.unjudged,
    }  # fmt: skip


def _output(output: ComparedOutput | None) -> dict[str, Any] | None:
    if output is None:
        return None
    headers = {name: printable(value) for name, value in output.headers}
    return {"value": printable(output.value), "headers": headers, "timestamp_ms": output.timestamp_ms,
            "origin": output.origin}  # fmt: skip


def _text(report: DiffReport) -> Iterator[str]:
    for sink in report.sinks:
        rows = [
            [_named(sink, each), str(each.place), *(_cell(output) for output in (each.old, each.new))]
            for each in sink.differences
        ]
        if rows:
            yield f"{sink.sink}: {sink.old:,} outputs of the old version, {sink.new:,} of the new"
            yield from table((sink.by, ">place", "old", "new"), rows)
            if len(rows) < sink.differing:
                yield f"and {sink.differing - len(rows):,} {sink.by}s more"
    for reason in report.unjudged:
        yield f"not compared: {reason}"
    yield report.verdict


def _named(sink: SinkDiff, difference: KeyDifference) -> str:
    """What *difference* is of; the place of an input record is not cut."""
    name = sink.named(difference)
    return _cut(name) if sink.by == "key" or name is None else name.decode()


def _cell(output: ComparedOutput | None) -> str:
    return "no output" if output is None else _cut(output.value)


def _cut(data: bytes | None) -> str:
    text = printable(data) or "null"
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]}..."
