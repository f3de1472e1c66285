"""`exactlyonce doctor`: finds what is wrong around a pipeline, who has to act, and how. It only looks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli import text
from exactlyonce.cli.arguments import (
    Parser,
    add_cluster,
    add_pipeline_name,
    add_settings,
    client,
    given,
    name_and_graph,
    set_command,
)
from exactlyonce.pipeline.settings import declared
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.views.doctor.findings import Diagnosis, Findings, Subject

_EXAMPLES = """\
Find what is wrong around a pipeline or a Spark sink: transactions that hold back readers
of its inputs and outputs; unsuitable settings of brokers, topics and stores; missing
access rights; decided output that is not visible yet, and the time left for it; input
that retention may remove; damaged blocks, and orphans. Each finding says who has to act,
and how. The doctor fences nobody and changes nothing. Checks that could not be made are
listed. With module:pipeline it also looks at the stores, and at a pipeline that has never
run. Exit code 1 for a problem, or a check that got no answer; else 0, also with notes.

examples:
  exactlyonce doctor order-totals
  exactlyonce doctor orders:pipeline --deep
  exactlyonce doctor order-totals --json
"""
_CHECKPOINTING = ("interval_ms", "timeout_ms", "tolerable_failed", "restart_budget_ms", "transaction_timeout_ms")
_LABEL_WIDTH = 7
FOUND = 1
"""The exit code where something is wrong, or a check failed."""


def add(parser: Parser) -> None:
    set_command(parser, "PIPELINE [options]", _EXAMPLES, doctor)
    add_pipeline_name(parser)
    parser.add_argument("--deep", action="store_true", help="read and check all blocks of all checkpoints")
    parser.add_argument(
        "--older-than",
        metavar="T",
        default="1m",
        help="foreign transactions that are open for less are only notes (default: 1m)",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON document")
    group = parser.add_argument_group(
        "checkpoints", "as the run has them, for the comparison with the brokers' settings"
    )
    add_settings(group, *(declared(CheckpointSettings)[name] for name in _CHECKPOINTING))
    add_cluster(parser)


def doctor(args: argparse.Namespace) -> int:
    from exactlyonce.engines.configuration import options_from
    from exactlyonce.engines.system_clock import SystemClock
    from exactlyonce.pipeline.durations import duration_ms
    from exactlyonce.views.doctor.examination import examine, resources_of

    older_than_ms = duration_ms(args.older_than, "--older-than")
    config = client(args)
    settings = options_from(given(args, CheckpointSettings)).checkpoint
    name, graph = name_and_graph(args)
    resources = resources_of(config, name, graph)
    subject, findings = examine(
        config, resources, graph, settings, now_ms=SystemClock().now_ms(), older_than_ms=older_than_ms, deep=args.deep
    )
    if args.json:
        print(json.dumps({"pipeline": name, "running": subject.sign_of_life or None, **as_json(findings)}))
    else:
        print(*_as_text(subject, findings), sep="\n")
    return FOUND if findings.problems or findings.failed else 0


def _as_text(subject: Subject, findings: Findings) -> Iterator[str]:
    width = text.terminal_width()
    state = subject.sign_of_life or "it does not run"
    yield from text.labelled(f"{subject.name} at {subject.config.bootstrap_servers}: ", state, 0, width, "")
    yield ""
    yield from as_text(findings, width)
    notes = len(findings.diagnoses) - findings.problems
    failed = [f"{counted(findings.failed, 'check')} failed"] if findings.failed else []
    none = "nothing else is known to be wrong" if failed else "nothing is wrong"
    verdict = counted(findings.problems, "problem") if findings.problems else none
    parts = [*failed, verdict, *([counted(notes, "note")] if notes else [])]
    yield ""
    yield f"{subject.name}: {', '.join(parts)}; {counted(len(findings.checked), 'check')} made, " + (
        f"{len(findings.unchecked)} not made, or only in part." if findings.unchecked else "all of them."
    )


def as_json(findings: Findings) -> dict[str, Any]:
    return {
        "problems": findings.problems,
        "findings": [vars(diagnosis) for diagnosis in findings.in_order],
        "checked": findings.checked,
        "not_checked": [unchecked._asdict() for unchecked in findings.unchecked],
    }


def as_text(findings: Findings, width: int) -> Iterator[str]:
    """The findings for people, the cause first: what could not be asked may be why the rest is as it is."""
    failed = [unchecked for unchecked in findings.unchecked if unchecked.failed]
    for what, why, _ in failed:
        yield from text.labelled("failed", f"{what}: {why}", 13, width, "")
    if failed:
        yield ""
    for diagnosis in findings.in_order:
        yield from _lines(diagnosis, width)
        yield ""
    if findings.checked:
        yield from text.labelled("checked", "; ".join(findings.checked), 13, width, "")
    for what, why, has_failed in findings.unchecked:
        if not has_failed:
            yield from text.labelled("not checked", f"{what}: {why}", 13, width, "")


def _lines(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    yield from text.labelled(f"{diagnosis.level}: ", diagnosis.what, len(diagnosis.level) + 2, width, "")
    for label, content in (("whose", diagnosis.whose), ("do", diagnosis.do)):
        if content:
            yield from text.labelled(label, content, _LABEL_WIDTH, width, "    ")
    for command in diagnosis.run:  # in one line, however long, to be copied
        yield f"    {'run':<{_LABEL_WIDTH}}{command}"
