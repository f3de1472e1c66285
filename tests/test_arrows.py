"""Which package may import which, and what the pure core may import at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "pipeline": set[str](),
    "checkpoint": {"pipeline"},
    "state": {"pipeline", "checkpoint"},
    "connectors": {"pipeline", "checkpoint", "state"},
    "sinks": {"pipeline", "checkpoint", "state", "connectors"},
    "engines": {"pipeline", "checkpoint", "state", "connectors", "sinks"},
    "testing": {"pipeline", "checkpoint", "state", "connectors", "sinks", "engines"},
    "cli": {"pipeline", "checkpoint", "state", "connectors", "sinks", "engines"},
}
PURE = [
    *("__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib"),
    *("heapq", "io", "itertools", "math", "operator", "re", "types", "typing", "zlib"),
    *("fastavro", "msgspec"),  # encoders: bytes in, values out
    *("exactlyonce.checkpoint", "exactlyonce.pipeline"),
]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of a file, also within functions; a relative one starts with a dot."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def is_part_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def python_files(repository: list[Path], *folders: str) -> list[Path]:
    return [path for path in repository if path.suffix == ".py" and path.parts[0] in (folders or path.parts)]


def test_arrows_point_one_way(repository: list[Path]) -> None:
    """A package imports only packages below it."""
    wrong = [
        f"{path}:{line}: {path.parts[0]} must not import {module}"
        for path in python_files(repository, *MAY_IMPORT)
        for line, module in imports(path)
        for package in MAY_IMPORT.keys() - MAY_IMPORT[path.parts[0]] - {path.parts[0]}
        if is_part_of(module, f"exactlyonce.{package}")
    ]
    assert wrong == []


def test_the_table_of_arrows_is_whole() -> None:
    """Every package has its row, and no arrow goes round in a circle."""
    assert sorted(MAY_IMPORT) == sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    assert not [(a, b) for a, below in MAY_IMPORT.items() for b in below if a in MAY_IMPORT[b]]


def test_imports_are_absolute_and_go_through_the_package(repository: list[Path]) -> None:
    """Nobody imports a root folder by its bare name, which would make two classes of one, or relatively."""
    wrong = [
        f"{path}:{line}: import exactlyonce.{module.lstrip('.')}"
        for path in python_files(repository)
        for line, module in imports(path)
        if module.startswith(".") or module.split(".")[0] in MAY_IMPORT
    ]
    assert wrong == []


def test_the_core_of_the_protocol_does_no_io(repository: list[Path]) -> None:
    """The protocol, all of checkpoint/ but its store, imports no client, thread, clock or source of randomness."""
    wrong = [
        f"{path}:{line}: {module}"
        for path in core_files(repository)
        for line, module in imports(path)
        if not any(is_part_of(module, pure) for pure in PURE) or is_part_of(module, "exactlyonce.checkpoint.store")
    ]
    assert wrong == []


def test_importing_the_core_loads_no_client(repository: list[Path]) -> None:
    """What the core imports of other packages brings in no Kafka client either."""
    modules = [f"exactlyonce.{'.'.join(path.with_suffix('').parts)}" for path in core_files(repository)]
    code = f"import sys, {', '.join(modules)}; print({{'confluent_kafka', 'kafka', 'pyspark'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def core_files(repository: list[Path]) -> list[Path]:
    """The modules of checkpoint/ that are the protocol itself."""
    return [
        path
        for path in python_files(repository, "checkpoint")
        if path.parts[1] != "store" and path.name != "__init__.py"
    ]
