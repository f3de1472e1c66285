"""Writes what documentation repeats of the code: help in cli.md, tables of settings.md, comparison.md and metrics.md.

`python docs/generate.py` writes these pages. The text around, and the last column of the tables of settings, are
written by hand; a setting without a row is an error.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli.main import parser
from exactlyonce.engines.local.monitoring.metrics import METRICS
from exactlyonce.engines.options import Restoration, RunOptions, StateSettings
from exactlyonce.pipeline.settings import CHOICE, FLAG, Declared, declared

DOCS = Path(__file__).parent
COMMAND_LINE, SETTINGS, COMPARISON, METRICS_PAGE = (
    DOCS / f"{name}.md" for name in ("cli", "settings", "comparison", "metrics")
)
COLUMNS = "100"
TABLES = {RunOptions: "run", Restoration: "run", CheckpointSettings: "checkpoint", StateSettings: "state"}


def commands(command: ArgumentParser, words: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    """Every command with its words, as `savepoints list`; first *command* itself."""
    yield words, command
    for action in command._actions:
        for name, below in action.choices.items() if isinstance(action.choices, dict) else ():
            yield from commands(below, f"{words} {name}".strip())


def command_line(page: str) -> str:
    """cli.md with the help of today; KeyError for a command that there is not, ValueError for one that is left out."""
    os.environ["COLUMNS"] = COLUMNS
    helps = {words: command.format_help() for words, command in commands(parser())}

    def block(match: re.Match[str]) -> str:
        return f"```text\n$ exactlyonce {match[1]}--help\n{helps.pop(match[1].strip())}```\n"

    page = re.sub(r"```text\n\$ exactlyonce (.*?)--help\n.*?```\n", block, page, flags=re.DOTALL)
    if helps:
        raise ValueError(f"{COMMAND_LINE.name} has no block for: {', '.join(helps)}")
    return page


def settings(page: str) -> str:
    """settings.md with the names, defaults and bounds of today; ValueError for a setting that has no row."""
    rows = {}
    for owner, table in TABLES.items():
        for each in declared(owner).values():
            negated = each.setting.kind == FLAG and (each.default or "(default: " in each.setting.help)
            first = f"`--{each.option}`, `--no-{each.option}`" if negated else f"`--{each.option}`"
            key = f"`[{table}] {each.key}`" if each.setting.in_file else ""
            rows[f"`--{each.option}`"] = f"| {first} |{key and f' {key}'} | {_default(each)} |"
    lines = []
    for line in page.splitlines():
        told = re.fullmatch(r"\| (`--[\w-]+`)[^|]*\|[^|]*\|[^|]*\| (.*)", line)
        lines.append(f"{rows.pop(told[1])} {told[2]}" if told and told[1] in rows else line)
    return _whole(SETTINGS, lines, rows)


def flink(page: str) -> str:
    """comparison.md with the settings' names in Flink of today; ValueError for one that has no row."""
    named = [each for owner in TABLES for each in declared(owner).values() if each.setting.flink]
    rows, lines = {f"`--{each.option}`": each.setting.flink for each in named}, []
    for line in page.splitlines():
        option = (re.match(r"\| (`--[\w-]+`)", line) or [line, ""])[1]
        lines.append(f"| {option} | {rows.pop(option)} |" if option in rows else line)
    return _whole(COMPARISON, lines, rows)


def _whole(page: Path, lines: list[str], missing: dict[str, str]) -> str:
    if missing:
        raise ValueError(f"{page.name} has no row for: {', '.join(missing)}")
    return "\n".join(lines) + "\n"


def metrics(page: str) -> str:
    """metrics.md with the metrics of today."""
    rows = ["| metric | kind | labels beside `pipeline` | meaning |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} |{labels and f' {labels}'} | {metric.help} |")
    table = "\n".join(["<!-- metrics -->", "", *rows, "", "<!-- end -->"])
    return re.sub("<!-- metrics -->.*<!-- end -->", lambda _: table, page, flags=re.DOTALL)


def _default(each: Declared) -> str:
    """A cell of the column "default"."""
    text, setting = each.default_text, each.setting
    return f"`{text}`" if setting.kind == CHOICE else text


if __name__ == "__main__":
    COMMAND_LINE.write_text(command_line(COMMAND_LINE.read_text()))
    SETTINGS.write_text(settings(SETTINGS.read_text()))
    COMPARISON.write_text(flink(COMPARISON.read_text()))
    METRICS_PAGE.write_text(metrics(METRICS_PAGE.read_text()))
