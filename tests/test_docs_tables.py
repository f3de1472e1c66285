"""The tables of the documentation agree with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from generate import COMPARISON, METRICS_PAGE, RUNNING, flink, keywords, metrics, settings
from generate import SETTINGS as SETTINGS_PAGE

from exactlyonce.checkpoint.coordinator import JOB_TRANSITIONS
from exactlyonce.checkpoint.events import CHECKPOINT_TRANSITIONS
from exactlyonce.checkpoint.settings import STRATEGIES, CheckpointSettings, restart_strategy
from exactlyonce.cli.main import parser
from exactlyonce.cli.spark_arguments import NOTHING_COMPARED
from exactlyonce.connectors.kafka.client_config import _SECURITY_KNOWN, MECHANISMS, OWNED, PROTOCOLS
from exactlyonce.pipeline import errors
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.pipeline.running import LocalSettings
from exactlyonce.pipeline.sink import Delivery
from exactlyonce.sinks.kafka.writer import SLOT_TRANSITIONS
from exactlyonce.testing.cluster import LIMIT_S

Table = Callable[..., list[dict[str, str]]]

ROOT = Path(__file__).parents[1]
SETTINGS, FLINK = "docs/settings.md", "docs/comparison.md"
OPTIONS = (SETTINGS, "command line", "in the file", "default", "effect and cost")
RESTARTS = (SETTINGS, "`[restart] strategy`", "options and their defaults", "what it does")
TIMEOUTS = (SETTINGS, "`tolerable_failed`", "`interval`", "`timeout`", "`restart_budget`", "a transaction needs")


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def sentence(pattern: str, page: str = SETTINGS) -> str:
    match = re.search(pattern, (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert match, pattern
    return match[1]


def run_options() -> set[str]:
    commands = next(action for action in parser()._actions if isinstance(action.choices, dict))
    running = dict(commands.choices or {})["run"]
    return {name for action in running._actions for name in action.option_strings if name.startswith("--")}


def test_every_setting_is_documented(table: Table) -> None:
    rows = table(*OPTIONS)
    named = {name for row in rows for name in code(row["command line"])}
    assert named | {"--restart", "--help"} == run_options()


def test_every_option_has_its_name_in_flink_or_none(table: Table) -> None:
    rows = table(FLINK, "here", "in Flink 2")
    assert all(code(row["in Flink 2"]) for row in rows)
    told = {name for row in rows for name in code(row["here"])}
    without = code(sentence(r"^These have no equal there: (.*?)\n\n", FLINK))
    missing = {name for name in without if name.startswith("--")}
    assert not told & missing
    named = {name for name in told if name.startswith("--")} | missing
    assert named | {"--help", "--no-incremental", "--no-standby"} == run_options()


def test_a_run_in_python_has_the_options_of_the_command() -> None:
    options = {name.removeprefix("--").replace("-", "_") for name in run_options() if not name.startswith("--no-")}
    keywords = {*LocalSettings.__annotations__}
    assert options - keywords == {"help", "param", "json", "verbose"}
    assert keywords - options == {"on_event"}


@pytest.mark.parametrize(
    ("page", "written"),
    [
        (SETTINGS_PAGE, settings), (COMPARISON, flink), (METRICS_PAGE, metrics),
        (RUNNING, keywords),
    ],
    ids=["settings", "comparison", "metrics", "keywords"],
)  # fmt: skip
def test_the_files_are_those_that_are_generated(page: Path, written: Callable[[str], str]) -> None:
    assert written(page.read_text()) == page.read_text(), "run: .venv/bin/python docs/generate.py"


def test_the_transaction_timeouts_are_as_calculated(table: Table) -> None:
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
    assert set(code(sentence(r"giving one is an error: (.*?)\. The\s"))) == OWNED
    rows = {name: row["values"] for row in table(SETTINGS, "setting", "values") for name in code(row["setting"])}
    assert rows.keys() == _SECURITY_KNOWN
    assert set(code(rows["security.protocol"])) == set(PROTOCOLS)
    assert set(code(rows["sasl.mechanism"])) == set(MECHANISMS)


def test_the_exit_codes_are_those_of_the_code(table: Table) -> None:
    """The table of operations and the help have the code of every error, those of ends without one, and no other."""
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ExactlyOnceError)]
    codes = {0, NOTHING_COMPARED} | {each.exit_code for each in kinds}
    assert {int(row["code"]) for row in table("docs/operations.md", "code", "meaning", "do")} == codes
    listed = (parser().epilog or "").partition("exit codes:")[2]
    assert {int(each) for each in re.findall(r"^  (\d+) ", listed, re.MULTILINE)} == codes


def moves(diagram: str) -> set[tuple[str, str]]:
    lines = re.findall(r"(?:\w+ (?:->|\|) )+\w+", diagram)
    chains = [[step.split(" | ") for step in line.split(" -> ")] for line in lines]
    return {(a, b) for chain in chains for before, after in pairwise(chain) for a in before for b in after}


def test_the_diagrams_of_states_are_those_of_the_code() -> None:
    fence = (ROOT / "ARCHITECTURE.md").read_text().partition("## States")[2].split("```")[1]
    drawn = {name: moves(diagram) for name, diagram in re.findall(r"^(\w+) (.*?)(?=^\w|\Z)", fence, re.DOTALL | re.M)}
    job = {(a.value, b.value) for a, after in JOB_TRANSITIONS.items() for b in after}
    checkpoint = {(a.value, b.value) for a, after in CHECKPOINT_TRANSITIONS.items() for b in after}
    slot = {(a.value, b.value) for a, b in SLOT_TRANSITIONS.items()}
    assert drawn == {"job": job, "checkpoint": checkpoint, "slot": slot}


def test_the_deliveries_are_those_of_the_code(table: Table) -> None:
    page = "docs/delivery.md"
    rows = table(page, "`delivery`", "what it does", "choose it when")
    assert [code(row["`delivery`"]) for row in rows] == [[each] for each in get_args(Delivery)]
    assert table(page, "", *(f"`{each}`" for each in get_args(Delivery)))


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """The links below the headings of docs/index.md, and those of docs/design/README.md, lead to each page."""
    linked = {
        (index.parent / link).resolve()
        for index in (ROOT / "docs/index.md", ROOT / "docs/design/README.md")
        for link in re.findall(r"\]\(([\w./-]+\.md)\)", index.read_text())
    }
    assert {*(ROOT / "docs").rglob("*.md")} - linked == {ROOT / "docs/index.md"}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_site_is_searched_for_what_users_want(tmp_path: Path) -> None:
    """Its index finds what users search for, and nothing in the pages for contributors."""
    sphinx = [sys.executable, "-m", "sphinx", "--quiet", "--fresh-env", "--fail-on-warning", "--nitpicky"]
    built = subprocess.run(
        [*sphinx, "--conf-dir", "docs", ".", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert built.returncode == 0, built.stderr
    index = json.loads((tmp_path / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))

    def pages(*stems: str) -> set[str]:
        found = []
        for stem in stems:
            numbers = [index[terms].get(stem, []) for terms in ("terms", "titleterms")]
            flat = [each for some in numbers for each in (some if isinstance(some, list) else [some])]
            found.append({index["docnames"][number] for number in flat})
        return set.intersection(*found)

    assert "docs/event-time" in pages("late")
    assert {"docs/pipelines", "docs/tasks/dead-letters"} <= pages("dead", "letter")
    evidence = {"docs/nexmark", "docs/benchmarks", "docs/guarantees", "docs/comparison", "ARCHITECTURE"}
    hidden = evidence | {each for each in index["docnames"] if each.startswith("docs/design/")}
    assert hidden & {page for stem in {*index["terms"], *index["titleterms"]} for page in pages(stem)} == set()
