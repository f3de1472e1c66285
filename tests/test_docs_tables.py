"""The tables of the documentation agree with the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from exactlyonce.checkpoint.restart import STRATEGIES, restart_strategy
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli.main import parser
from exactlyonce.connectors.client_config import _SECURITY_KNOWN, MECHANISMS, OWNED, PROTOCOLS
from exactlyonce.engines.configuration import _COUNTS, _DURATIONS, _RUN, duration_ms, options_from

Table = Callable[..., list[dict[str, str]]]

SETTINGS = "docs/settings.md"
OPTIONS = (SETTINGS, "command line", "in the file", "default", "what it does, and what it costs")
RESTARTS = (SETTINGS, "`[restart] strategy`", "options and their defaults", "what it does")
TIMEOUTS = (
    SETTINGS, "`tolerable_failed`", "`interval`", "`timeout`", "`restart_budget`", "a transaction needs"
)  # fmt: skip


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def run_options() -> set[str]:
    """The long options of `exactlyonce run`."""
    commands = next(action for action in parser()._actions if isinstance(action.choices, dict))
    running = dict(commands.choices or {})["run"]
    return {name for action in running._actions for name in action.option_strings if name.startswith("--")}


def test_every_setting_is_documented(table: Table) -> None:
    """The tables have every option of `run` and every key of a file, and no other."""
    rows = table(*OPTIONS)
    assert {code(row["command line"])[0] for row in rows} | {"--restart", "--help"} == run_options()
    keys = {code(row["in the file"])[0] for row in rows if row["in the file"]}
    expected = {f"[run] {name}" for name in _RUN} | {f"[checkpoint] {name}" for name in (*_DURATIONS, *_COUNTS)}
    assert keys == expected | {"[kafka]", "[kafka] bootstrap.servers"}


def test_the_defaults_are_those_of_the_code(table: Table) -> None:
    """Durations and counts of the tables are what an empty file gives."""
    options = options_from({"bootstrap_servers": "127.0.0.1:9092"})
    for row in table(*OPTIONS):
        section, _, name = [*code(row["in the file"]), ""][0].partition(" ")
        if section == "[checkpoint]" and name in _DURATIONS and name != "transaction_timeout":
            assert getattr(options.checkpoint, f"{name}_ms") == duration_ms(row["default"]), name
        elif section == "[checkpoint]" and name in _COUNTS:
            assert getattr(options.checkpoint, name) == int(row["default"]), name
        elif section == "[run]":
            assert str(getattr(options, name)) == row["default"].strip("`"), name


def test_the_transaction_timeouts_are_as_calculated(table: Table) -> None:
    """Every line of the example holds, and those that are said to be refused are."""
    for row in table(*TIMEOUTS):
        tolerable, *durations = list(row.values())[:4]
        interval_ms, timeout_ms, budget_ms = map(duration_ms, durations)
        settings = CheckpointSettings(
            interval_ms=interval_ms, timeout_ms=timeout_ms, tolerable_failed=int(tolerable), restart_budget_ms=budget_ms
        )
        seconds = float(row["a transaction needs"].split()[0])
        assert settings.transaction_timeout_needed_ms == seconds * 1000
        assert ("refused" in row["a transaction needs"]) == (seconds > 900)


def test_the_restart_strategies_are_those_of_the_code(table: Table) -> None:
    """Their names, their options, their defaults."""
    documented = {code(row["`[restart] strategy`"])[0]: row for row in table(*RESTARTS)}
    assert documented.keys() == STRATEGIES.keys()
    for name, row in documented.items():
        given = dict(each.split(" = ") for each in code(row["options and their defaults"]))
        fields = {field: value for field, value in vars(restart_strategy(name)).items() if not field.startswith("_")}
        assert {field.removesuffix("_ms") for field in fields} == set(given)
        for field, value in fields.items():
            text = given[field.removesuffix("_ms")]
            assert value == (duration_ms(text) if field.endswith("_ms") else int(text))


def test_the_settings_of_kafka_are_those_of_the_code(table: Table) -> None:
    """The page lists every setting that is ours, every protocol and mechanism, and every security setting."""
    text = (Path(__file__).parents[1] / SETTINGS).read_text()
    owned = re.search(r"giving one is an error: (.*?)\. The\n", text, re.DOTALL)
    assert owned
    assert set(code(owned[1])) == OWNED
    rows = {name: row["values"] for row in table(SETTINGS, "setting", "values") for name in code(row["setting"])}
    assert rows.keys() == _SECURITY_KNOWN
    assert set(code(rows["security.protocol"])) == set(PROTOCOLS)
    assert set(code(rows["sasl.mechanism"])) == set(MECHANISMS)
