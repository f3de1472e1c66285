"""Definitions of cells and tests: digests, so that evidence of a weaker cell or judge does not count for today's.

A cell's definition is what its way has beside its name, and the rig: the code of pipelines, input, faults and judges.
That of every test is the code that runs it. Comments, docstrings and layout change no digest.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from cells import Cell
from crossing import crossing
from drivers import HERE as SPARK
from folds import expected
from kafka_proxy import KafkaProxy
from oracles import Reader
from plain_consumer import plain_consumer
from row_tests import run_test
from running import assert_once, assert_updates, orders
from unreferenced import unreferenced_blocks

NAMED = {"actions", "fates", "sinks", "shapes", "modes"}
"""Fields of a way that a cell's name chooses from."""
FILES = (
    *(
        Path(inspect.getfile(part))
        for part in (Cell, crossing, expected, KafkaProxy, Reader, plain_consumer, unreferenced_blocks)
    ),
    SPARK / "sink_job.py",
)
FUNCTIONS = (orders, assert_updates, assert_once)
"""What the rig has from `running`, which starts processes besides."""
SAME_RIGS: Mapping[str, str] = {
    "1bf11143": "the settings of consumers were in two files, and are in plain_consumer",
    "d66ff3ad": "a run could be ended before it met the loss of a worker, and failed: who passed has met and asked all",
    "19292091": "a cell could fail by a line of progress within a command's answer, or of a worker within an event",
}
"""Digests of earlier rigs whose successes count as today's, with the reason: they asked the same of who passed."""


def definitions_of(cell: Cell) -> list[str]:
    """Those of the outcomes that count: today's, then those by an earlier rig that asked the same."""
    fields = {name: value for name, value in asdict(cell.way).items() if name not in NAMED}
    way = _digest(f"{type(cell.way).__name__} {fields}")
    return [f"{way}-{rig}" for rig in (rig_digest(), *SAME_RIGS)]


def definition_of_tests() -> str:
    return _digest(code_of(inspect.getsource(run_test)))


@cache
def rig_digest() -> str:
    sources = [*(file.read_text() for file in FILES), *(inspect.getsource(function) for function in FUNCTIONS)]
    return _digest("\n".join(map(code_of, sources)))


def code_of(source: str) -> str:
    """The syntax tree of *source*, without docstrings, and as all versions of Python write it."""
    return repr(_plain(ast.parse(source)))


def _plain(node: Any) -> Any:
    """Fields that are empty are left out: a new version of Python has more of them."""
    if isinstance(node, list):
        return [_plain(each) for each in node if not _is_docstring(each)]
    if isinstance(node, ast.AST):
        fields = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
        return type(node).__name__, {name: _plain(value) for name, value in fields.items()}
    return node


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]
