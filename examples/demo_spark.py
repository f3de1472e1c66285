"""Spark's part in the demo: the history before the stream, and the audit after it, each by its command.

Invariant: a command's summary is shown as it is; its exit code is the verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from exactlyonce.errors import ExactlyOnceError

MASTER = "local[2]"
LINES_OF_TROUBLE = 20


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    summary: dict[str, Any]
    """The line of JSON on its stdout."""
    trouble: str
    """The end of its stderr."""
    seconds: float


def on_spark(command: str, servers: str, *options: str) -> Done:
    """Run `exactlyonce COMMAND flights:pipeline` on a Spark that is embedded in it."""
    began = time.monotonic()
    words = [sys.executable, "-m", "exactlyonce.cli.main", command, "flights:pipeline", "--json", "--master", MASTER]
    ended = subprocess.run(
        [*words, "--bootstrap-servers", servers, *options],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = ended.stdout.splitlines()
    trouble = "\n".join(ended.stderr.splitlines()[-LINES_OF_TROUBLE:])
    return Done(ended.returncode, json.loads(lines[-1]) if lines else {}, trouble, time.monotonic() - began)


def backfill(servers: str, records: int) -> int:
    """Compute the history, all *records* of it; -> the checkpoint at its end."""
    done = on_spark("backfill", servers)
    if done.code:
        raise ExactlyOnceError(f"the backfill ended with exit code {done.code}:\n{done.trouble}")
    summary = done.summary
    read, written, checkpoint = summary["records_in"], summary["records_out"], int(summary["checkpoint"])
    print(f"  {read:,} records read, {written:,} updates written, checkpoint {checkpoint}, {done.seconds:.0f} s")
    for source, offsets in summary["offsets"].items():
        shown = "  ".join(f"{source}[{partition}]={offset:,}" for partition, offset in sorted(offsets.items()))
        print(f"  S0: {shown}", flush=True)
    if read != records:
        raise ExactlyOnceError(f"the backfill read {read:,} records, but the history has {records:,}")
    return checkpoint


def audit(servers: str) -> bool:
    """Audit the output of the retained checkpoints; -> whether it is right, and any was judged."""
    done = on_spark("audit", servers)
    if not done.summary:
        raise ExactlyOnceError(f"the audit ended with exit code {done.code}:\n{done.trouble}")
    summary, findings = done.summary, done.summary["findings"]
    judged = summary["checkpoints"]
    span = f"{len(judged)} checkpoints, {judged[0]} to {judged[-1]}" if judged else "no checkpoint"
    print(f"  {span}: {summary['records_in']:,} records in, {summary['records_out']:,} out, {done.seconds:.0f} s")
    for checkpoint in summary["unjudged"]:
        print(f"  not judged: {checkpoint}")
    for finding in findings[:LINES_OF_TROUBLE]:
        print(f"  {finding['kind']}: {finding['topic']}[{finding['partition']}] offset {finding['offset']}")
    kinds = Counter(finding["kind"] for finding in findings)
    counts = "  ".join(f"{kind} {kinds[kind]}" for kind in ("missing", "doubled", "changed", "reordered", "foreign"))
    print(f"  {counts}; exit code {done.code}", flush=True)
    return done.code == 0 and bool(judged)
