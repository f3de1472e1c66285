"""`exactlyonce audit`: compares the output with the input. It fences nobody: a running pipeline goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from exactlyonce.cli.arguments import Parser, add_pipeline, at_least_one, client, loaded, set_command
from exactlyonce.cli.spark_arguments import NOTHING_COMPARED, SPARK_TEXT, LineOfProgress, add_replaying, executors

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.audit import AuditFinding, AuditReport
    from exactlyonce.engines.bounded.unit.lane_audit import PlainRecord

_EXAMPLES = f"""\
Compute the output between the retained checkpoints again, along their order logs, and
compare it with the records that read_committed readers see. Show missing, doubled,
changed and reordered records, and records of no checkpoint, each with its place and its
input record. Output that can no longer be judged is named. The audit fences nobody,
opens no transaction and writes nothing. Exit code 1 for any finding, 10 if nothing could
be judged.

examples:
  exactlyonce audit orders:pipeline
  exactlyonce audit orders:pipeline --from 120 --to 122 --on spark
  exactlyonce audit orders:pipeline --json

{SPARK_TEXT}"""
FOUND = 1
"""The exit code of any finding."""
_SHOWN = 20


def add(parser: Parser) -> None:
    set_command(parser, "MODULE:PIPELINE [options]", _EXAMPLES, audit)
    add_pipeline(parser)
    parser.add_argument("--from", dest="first", metavar="N", type=int, help="the first checkpoint (default: oldest)")
    parser.add_argument("--to", dest="last", metavar="N", type=int, help="the last one (default: newest)")
    parser.add_argument(
        "--ignore-foreign", action="store_true", help="skip records of other writers in the output topics"
    )
    parser.add_argument(
        "--limit", metavar="N", type=at_least_one, default=_SHOWN,
        help=f"the most findings to show; others are counted (default: {_SHOWN})",
    )  # fmt: skip
    add_replaying(parser)


def audit(args: argparse.Namespace) -> int:
    """Run the audit, print its report, and return its exit code."""
    from exactlyonce.engines.bounded.audit import Audit

    config = client(args)
    pipeline = loaded(args)
    name = pipeline.pipeline.name
    work = Audit(pipeline, config, args.first, args.last, ignore_foreign=args.ignore_foreign, shown=args.limit)
    progress = LineOfProgress(name, json=args.json)
    try:
        with executors(args, name, work.offsets, progress) as where:
            report = work.run(where, progress)
    finally:
        progress.close()
    if args.json:
        print(json.dumps(as_json(report)), flush=True)
    else:
        print(*as_text(report), sep="\n")
    return exit_code(report)


def exit_code(report: AuditReport) -> int:
    if report.findings:
        return FOUND
    return 0 if report.is_judged else NOTHING_COMPARED


def as_json(report: AuditReport) -> dict[str, Any]:
    """The report, for machines. Keys and values are text, with replacement characters for other bytes."""
    return {
        "pipeline": report.pipeline,
        "checkpoints": report.checkpoints,
        "records_in": report.records_in,
        "skipped": report.skipped,
        "records_out": report.records_out,
        "findings": [_finding(finding) for finding in report.findings],
        "more_findings": {**report.more},
        "hint": report.hint,
        "unjudged": report.unjudged,
    }


def _finding(placed: AuditFinding) -> dict[str, Any]:
    finding = placed.finding
    origin = dict(zip(("topic", "partition", "offset"), finding.origin, strict=True)) if finding.origin else None
    return {
        "kind": finding.kind,
        "sink": placed.sink,
        "topic": placed.topic,
        "partition": finding.partition,
        "offset": finding.offset,
        "checkpoint": placed.checkpoint,
        "input": origin,
        "expected": _record(finding.expected),
        "seen": _record(finding.seen),
    }


def _record(record: PlainRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    headers = [[name, _text(value)] for name, value in record.headers]
    time = {} if record.timestamp_ms is None else {"timestamp_ms": record.timestamp_ms}
    return {"key": _text(record.key), "value": _text(record.value), "headers": headers, **time}


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")


def as_text(report: AuditReport) -> Iterator[str]:
    """The report, for people."""
    for placed in report.findings:
        yield from _lines(placed)
    for kind, count in sorted(report.more.items()):
        yield f"and {count:,} more {kind}: --limit shows them"
    for reason in report.unjudged:
        yield f"not judged: {reason}"
    if report.hint:
        yield report.hint
    yield report.verdict


def _lines(placed: AuditFinding) -> Iterator[str]:
    finding = placed.finding
    checkpoint = f"checkpoint {placed.checkpoint}, " if placed.checkpoint is not None else ""
    yield f"{finding.kind}: {placed.place} (sink {placed.sink}, {checkpoint}from {placed.stem})"
    if finding.expected is not None:
        yield f"    expected {finding.expected}"
    if finding.seen is not None and finding.seen != finding.expected:
        yield f"    seen     {finding.seen}"
