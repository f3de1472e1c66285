"""Notebooks: the one that is shipped does what it shows, and a cell that cannot be a module is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from exactlyonce.testing.cluster import LIMIT_S, OwnCluster

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

IN_A_SHELL = """\
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "exactlyonce")
for line, cell in {cells!r}:
    try:
        shell.run_cell_magic("pipeline", line, cell)
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
    else:
        print(sorted(shell.user_ns.keys() & {{"Pipeline", "pipeline", "_hidden"}}))
"""
CELLS = {
    ("orders", "from exactlyonce import Pipeline\npipeline = Pipeline('orders')\n_hidden = 1"): (
        "['Pipeline', 'pipeline']"
    ),
    ("", "1"): "ConfigError %%pipeline: name the cell by an identifier, as %%pipeline orders.",
    ("my orders", "1"): "ConfigError %%pipeline my orders: name the cell by an identifier",
    ("orders", "Order.customer"): "A cell of %%pipeline is a module of its own: it imports and defines all",
    ("orders", "%time 1"): "A cell of %%pipeline is plain Python: lines with % or ! go into another cell.",
    ("orders", "import nowhere"): "imports 'nowhere', which is not installed",
}
"""By line and text of a cell, what is printed."""


DURATION = re.compile(r"\d[\d.]* m?s\b|\d+m \d+s")


def outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What each cell with code has printed, and the result that it shows, without the time that it took."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[shown for output in cell.outputs if (shown := text_of(output))] for cell in cells]


def text_of(output: Any) -> str:
    if output.output_type == "execute_result":
        return DURATION.sub("", output.data["text/html"])
    return str(output.text) if output.get("name") == "stdout" else ""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_shipped_notebook(stoppable: OwnCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXACTLYONCE_BOOTSTRAP_SERVERS", stoppable.bootstrap_servers)
    monkeypatch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)  # PySpark leaves it behind a session of Connect
    read: Any = nbformat.reads  # it has no types
    shown, run = (read(NOTEBOOK.read_text(), 4) for _ in range(2))
    NotebookClient(run, timeout=LIMIT_S, resources={"metadata": {"path": tmp_path}}).execute()
    assert outputs(run) == outputs(shown)
    assert ["exactly once: nothing is wrong" in text for text in outputs(run)[-1]] == [True]


def test_the_magic(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_A_SHELL.format(cells=list(CELLS))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()
    assert [said for said, line in zip(CELLS.values(), printed, strict=True) if said not in line] == [], printed
