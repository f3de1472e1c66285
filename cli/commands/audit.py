"""`exactlyonce audit`: what readers see against what the input gives. It takes no lease: a running pipeline runs on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from exactlyonce.cli.arguments import Commands, add_command, add_pipeline, client, loaded
from exactlyonce.cli.spark_arguments import SPARK_TEXT, add_replaying, replaying

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.audit.audit import AuditFinding, AuditReport
    from exactlyonce.engines.bounded.audit.compare import PlainRecord

_EXAMPLES = f"""\
Compute again what a pipeline put out between its retained checkpoints, along their
order logs, and compare it with what read_committed readers see: records that are
missing, doubled, changed, reordered, or of no checkpoint, each with its place and with
the input record that it stems from. What cannot be judged any more is said. It fences
nobody, opens no transaction and writes nothing. Exit code 1 if anything was found, 2 if
nothing could be judged.

examples:
  exactlyonce audit orders:pipeline
  exactlyonce audit orders:pipeline --from 120 --to 122 --in-process
  exactlyonce audit orders:pipeline --json

{SPARK_TEXT}"""
FOUND, NOTHING_JUDGED = 1, 2
"""Exit codes."""
SHOWN_BYTES_MAX = 200


def add(commands: Commands) -> None:
    """The parser."""
    parser = add_command(commands, "audit", "MODULE:PIPELINE [options]", "compare output with input", _EXAMPLES, audit)
    add_pipeline(parser)
    parser.add_argument("--from", dest="first", metavar="N", type=int, help="the first checkpoint (default: oldest)")
    parser.add_argument("--to", dest="last", metavar="N", type=int, help="the last one (default: newest)")
    parser.add_argument(
        "--ignore-foreign", action="store_true", help="others write to the output topics too: skip their records"
    )
    add_replaying(parser)


def audit(args: argparse.Namespace) -> int:
    """Run it; the exit code says how it came out."""
    from exactlyonce.cli.spark_progress import LineOfProgress
    from exactlyonce.engines.bounded.audit.audit import Audit

    config = client(args)
    pipeline = loaded(args)
    progress = LineOfProgress(pipeline.pipeline.name, json=args.json)
    try:
        with replaying(args, pipeline.pipeline.name, progress.stage) as where:
            work = Audit(pipeline, config, where.submit, where.staging, progress, ignore_foreign=args.ignore_foreign)
            report = work.run(args.first, args.last)
    finally:
        progress.close()
    if args.json:
        print(json.dumps(as_json(report)), flush=True)
    else:
        print(*as_text(report), sep="\n")
    return exit_code(report)


def exit_code(report: AuditReport) -> int:
    """The verdict, for a shell."""
    if report.findings:
        return FOUND
    return 0 if _judged(report) else NOTHING_JUDGED


def _judged(report: AuditReport) -> bool:
    """Whether anything was compared: what a store has is not read."""
    return bool(report.checkpoints) and (report.records_out > 0 or not report.unjudged)


def as_json(report: AuditReport) -> dict[str, Any]:
    """The verdict, for machines. Keys and values as text, where they are none with replacement characters."""
    return {
        "pipeline": report.pipeline,
        "checkpoints": report.checkpoints,
        "records_in": report.records_in,
        "skipped": report.skipped,
        "records_out": report.records_out,
        "findings": [_finding(each) for each in report.findings],
        "unjudged": report.unjudged,
    }


def _finding(found: AuditFinding) -> dict[str, Any]:
    finding = found.finding
    origin = dict(zip(("topic", "partition", "offset"), finding.origin, strict=True)) if finding.origin else None
    return {
        "kind": finding.kind,
        "sink": found.sink,
        "topic": found.topic,
        "partition": finding.partition,
        "offset": finding.offset,
        "checkpoint": found.checkpoint,
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
    """The verdict, for people."""
    for found in report.findings:
        yield from _lines(found)
    for each in report.unjudged:
        yield f"not judged: {each}"
    if not report.checkpoints:
        yield f"{report.pipeline}: no checkpoint could be judged."
        return
    if not report.findings and not _judged(report):
        nothing = "they read no records, nothing was compared"
        why = "none of their output could be judged" if report.records_in else nothing
        yield f"{report.pipeline}: checkpoints {_numbers(report.checkpoints)}: {why}."
        return
    whole = "exactly once: nothing is wrong"
    verdict = f"{len(report.findings)} findings" if report.findings else whole
    if report.unjudged and not report.findings:
        verdict = f"of what was judged, {whole}"
    skipped = f", {report.skipped:,} of them skipped" if report.skipped else ""
    yield (
        f"{report.pipeline}: checkpoints {_numbers(report.checkpoints)}, {report.records_in:,} records in{skipped}, "
        f"{report.records_out:,} out: {verdict}."
    )


def _numbers(checkpoints: list[int]) -> str:
    if len(checkpoints) == 1 or checkpoints[-1] - checkpoints[0] >= len(checkpoints):
        return ", ".join(map(str, checkpoints))
    return f"{checkpoints[0]} to {checkpoints[-1]}"


def _lines(found: AuditFinding) -> Iterator[str]:
    finding = found.finding
    partition = "?" if finding.partition is None else finding.partition
    place = f"{found.topic}[{partition}]"
    if finding.seen is None:
        place += f" after offset {finding.offset}" if finding.offset is not None else " at the beginning"
    else:
        place += f" offset {finding.offset}"
    stems = "{}[{}] offset {}".format(*finding.origin) if finding.origin else "no record of the input"
    checkpoint = f"checkpoint {found.checkpoint}, " if found.checkpoint is not None else ""
    yield f"{finding.kind}: {place} (sink {found.sink}, {checkpoint}from {stems})"
    if finding.expected is not None:
        yield f"    expected {_shown(finding.expected)}"
    if finding.seen is not None and finding.seen != finding.expected:
        yield f"    seen     {_shown(finding.seen)}"


def _shown(record: PlainRecord) -> str:
    def short(data: bytes | None) -> str:
        text = repr(data)[:SHOWN_BYTES_MAX]
        return text if data is None or len(repr(data)) <= SHOWN_BYTES_MAX else f"{text}..."

    headers = f" headers {list(record.headers)!r}" if record.headers else ""
    time = "" if record.timestamp_ms is None else f" timestamp {record.timestamp_ms}"
    return f"key {short(record.key)} value {short(record.value)}{headers}{time}"
