"""Sources and sinks of other packages, found by their entry points: named in `explain`, and errors that name them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from exactlyonce.testing.cluster import LIMIT_S

PIPELINE = """
from exactlyonce import Pipeline
from shop_sqlite import JournalSource, SqliteSink

pipeline = Pipeline("shop")
pipeline.source("journal", JournalSource("in.db")).sink("db", SqliteSink("out.db"))
"""
Installed = Callable[[str, str, str], Path]


def explain(folder: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    (folder / "shop.py").write_text(PIPELINE)
    command = [sys.executable, "-m", "exactlyonce.cli.main", "explain", "shop:pipeline"]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(packages)}, capture_output=True, text=True, timeout=LIMIT_S
    )


def test_explain_names_the_package(shop_sqlite: Path, tmp_path: Path) -> None:
    explained = explain(tmp_path, shop_sqlite)
    assert explained.stdout.splitlines()[1:] == [
        "  journal  source            JournalSource journal:in.db  (journal of shop_sqlite 1.2)  : Order",
        "  db       sink              <- journal SqliteSink  (sqlite of shop_sqlite 1.2)",
    ], explained.stderr


def test_an_entry_point_that_does_not_load(shop_sqlite: Path, tmp_path: Path) -> None:
    """The error names the entry point and its package; a class that no entry point names needs none."""
    entries = next(shop_sqlite.glob("*.dist-info")) / "entry_points.txt"
    entries.write_text("[exactlyonce.sinks]\nsqlite = shop_sqlite:Missing\n")
    explained = explain(tmp_path, shop_sqlite)
    assert explained.returncode == 2
    assert "The entry point 'sqlite' of exactlyonce.sinks, shop_sqlite:Missing, cannot be loaded" in explained.stderr
    assert "Repair or uninstall the package shop_sqlite 1.2." in explained.stderr
    entries.write_text("[exactlyonce.sinks]\nother = other_package:Missing\n")
    assert explain(tmp_path, shop_sqlite).stdout.splitlines()[-1].endswith("<- journal SqliteSink")


def test_two_packages_of_one_name(shop_sqlite: Path, installed: Installed, tmp_path: Path) -> None:
    installed("other_sqlite", "", "[exactlyonce.sinks]\nsqlite = other_sqlite:Sink\n")
    explained = explain(tmp_path, shop_sqlite)
    assert explained.returncode == 2
    assert "other_sqlite 1.2" in explained.stderr
    assert "both have an entry point 'sqlite' of exactlyonce.sinks: uninstall one of them." in explained.stderr
