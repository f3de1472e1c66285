"""Writes what repeats the declarations: tables of settings.md, comparison.md and metrics.md, and the types of keyword
arguments in pipeline/running.py. The site alone has the help of each command in cli.md.

`python docs/generate.py` writes these files. The text around, and the last column of the tables of settings, are
written by hand; a setting without a row is an error.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path

from exactlyonce.checkpoint.settings import STRATEGIES, CheckpointSettings
from exactlyonce.cli.main import parser
from exactlyonce.engines.events import LEVELS
from exactlyonce.engines.local.monitoring.serving import METRICS
from exactlyonce.engines.options import Restoration, RunOptions, StateSettings, settings_of_bounded_work
from exactlyonce.pipeline.settings import CHOICE, FLAG, Declared, declared

DOCS = Path(__file__).parent
COMMAND_LINE, SETTINGS, COMPARISON, METRICS_PAGE = (
    DOCS / f"{name}.md" for name in ("cli", "settings", "comparison", "metrics")
)
RUNNING = DOCS.parent / "pipeline" / "running.py"
COLUMNS = "100"
TABLES = {RunOptions: "run", Restoration: "run", CheckpointSettings: "checkpoint", StateSettings: "state"}
_SUBJECTS = {
    "checkpoints": {"checkpoint_partitions", *(each.keyword for each in declared(CheckpointSettings).values())},
    "state": {each.keyword for each in declared(StateSettings).values()},
}
"""The group of the command's help, without which a setting's help is not clear."""


def commands(command: ArgumentParser, words: str = "") -> Iterator[tuple[str, ArgumentParser]]:
    """Every command with its words, as `savepoints list`; first *command* itself."""
    yield words, command
    for action in command._actions:
        for name, below in action.choices.items() if isinstance(action.choices, dict) else ():
            yield from commands(below, f"{words} {name}".strip())


def command_line(page: str) -> str:
    """cli.md with the help of each command below its heading, as the site has it. KeyError for a heading of no command.

    A command without a heading is below its group's; a group without one has a section at the end.
    """
    os.environ["COLUMNS"] = COLUMNS
    headings = {"", *re.findall(r"^##+ (.*)$", page, re.MULTILINE)}
    helps: dict[str, str] = {}
    for words, command in commands(parser()):
        heading = words if words in headings else words.partition(" ")[0]
        block = f"\n```text\n$ {f'exactlyonce {words}'.strip()} --help\n{command.format_help()}```\n"
        helps[heading] = helps.get(heading, "") + block
    before, heading, after = page.partition("\n## ")
    page = before + helps.pop("") + heading + after
    page = re.sub(r"^##+ (.*)\n", lambda match: match[0] + helps.pop(match[1]), page, flags=re.MULTILINE)
    return page + "".join(f"\n## {name}\n{block}" for name, block in helps.items())


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


def keywords(page: str) -> str:
    """running.py with the settings of today, as types of keyword arguments."""
    bounded = {each.keyword: each for each in settings_of_bounded_work()}
    of_run = [
        each
        for each in chain.from_iterable(declared(owner).values() for owner in TABLES)
        if each.keyword not in bounded
    ]
    of_restart = dict.fromkeys(each.name for owner in STRATEGIES.values() for each in fields(owner) if each.init)
    classes = [
        "class RestartSettings(TypedDict, total=False):", '    """A restart strategy."""', "",
        f"    strategy: {_literal(STRATEGIES)}",
        *(f"    {name.removesuffix('_ms')}: {'Duration' if name.endswith('_ms') else 'int'}" for name in of_restart),
        "", "",
        "class BoundedSettings(ClusterSettings, total=False):", '    """The settings of bounded work."""', "",
        *(line for each in bounded.values() for line in _keyword(each)), "", "",
        "class LocalSettings(BoundedSettings, total=False):", '    """The settings of a run on this machine."""', "",
        *(line for each in of_run for line in _keyword(each)),
        "    restart: RestartSettings",
        '    """after failures (default: {"strategy": "exponential_delay"})."""',
        f"    log_level: {_literal(LEVELS)}",
        '    """the lowest level shown (default: info)."""',
        "    on_event: Callable[[dict[str, Any]], object]",
        '    """gets each event; without it, each is a line on stderr, see log_format."""',
    ]  # fmt: skip
    text = "\n".join(["# Written by docs/generate.py.", *classes, "", "", "# The end of what"])
    return re.sub("# Written by docs/generate.py.\n.*?# The end of what", lambda _: text, page, flags=re.DOTALL)


def _literal(choices: Iterable[str]) -> str:
    return f"Literal[{', '.join(map(json.dumps, choices))}]"


def _keyword(each: Declared) -> Iterator[str]:
    """A key of a TypedDict, and its docstring."""
    subject = next((f"{words}: " for words, keywords in _SUBJECTS.items() if each.keyword in keywords), "")
    default = "" if each.setting.kind == FLAG or each.default_text == "none" else f" (default: {each.default_text})"
    yield f"    {each.keyword}: {each.type}"
    text = f'"""{subject}{each.setting.help}{default}."""'
    yield from textwrap.wrap(text, 120, initial_indent="    ", subsequent_indent="    ")


def _default(each: Declared) -> str:
    """A cell of the column "default"."""
    text, setting = each.default_text, each.setting
    return f"`{text}`" if setting.kind == CHOICE else text


if __name__ == "__main__":
    RUNNING.write_text(keywords(RUNNING.read_text()))
    SETTINGS.write_text(settings(SETTINGS.read_text()))
    COMPARISON.write_text(flink(COMPARISON.read_text()))
    METRICS_PAGE.write_text(metrics(METRICS_PAGE.read_text()))
