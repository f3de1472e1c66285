"""Arrows between packages and between their rooms, what pure folders may import at all, how large a folder is.

A room is a folder of a package, or a module that others may import where they may not import its folder.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
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
ROOMS = {
    "checkpoint": {"checkpoint/commits", "checkpoint/records", "checkpoint/transactions"},
    "checkpoint/chandy_lamport": set[str](),
    "checkpoint/chandy_lamport/algorithm": set[str](),
    "checkpoint/chandy_lamport/cuts": set[str](),
    "checkpoint/records": set[str](),
    "checkpoint/clock": set[str](),
    "checkpoint/commits": {
        *("checkpoint/clock", "checkpoint/records", "checkpoint/requests", "checkpoint/transactions"),
    },
    "checkpoint/requests": {"checkpoint/clock", "checkpoint/records", "checkpoint/transactions/broker_answers"},
    "checkpoint/store": {"checkpoint", "checkpoint/commits", "checkpoint/records", "checkpoint/transactions"},
    "checkpoint/store/files": {"checkpoint", "checkpoint/records", "checkpoint/store"},
    "checkpoint/transactions": {"checkpoint/clock", "checkpoint/records", "checkpoint/requests"},
    "checkpoint/transactions/broker_answers": set[str](),
    "cli": {"cli/commands"},
    "cli/commands": {"cli", "cli/doctor", "cli/transactions"},
    "cli/doctor": {"cli", "cli/transactions"},
    "cli/transactions": {"cli"},
    "connectors": {"connectors/kafka"},
    "connectors/embedded": set[str](),
    "connectors/kafka": {"connectors/source"},
    "connectors/source": set[str](),
    "engines": {"engines/surroundings"},
    "engines/bounded": {"engines", "engines/bounded/unit", "engines/surroundings"},
    "engines/bounded/audit": {"engines", "engines/bounded", "engines/bounded/replay", "engines/bounded/unit"},
    "engines/bounded/ranges": {"engines"},
    "engines/bounded/replay": {"engines", "engines/bounded", "engines/bounded/unit"},
    "engines/bounded/unit": {"engines", "engines/bounded/ranges"},
    "engines/erasing": {"engines"},
    "engines/local": {"engines", "engines/bounded", "engines/surroundings"},
    "engines/savepoints": {"engines", "engines/surroundings"},
    "engines/surroundings": set[str](),
    "engines/spark": {
        *("engines", "engines/bounded", "engines/bounded/unit"),
        *("engines/spark/sink", "engines/spark/source"),
    },
    "engines/spark/sink": {"engines", "engines/spark", "engines/surroundings"},
    "engines/spark/source": {"engines", "engines/savepoints", "engines/spark"},
    "sinks": {
        *("sinks/committer", "sinks/deferred", "sinks/files", "sinks/kafka", "sinks/mysql", "sinks/postgres"),
        *("sinks/prepared", "sinks/redis", "sinks/write_ahead", "sinks/writer"),
    },
    "sinks/committer": set[str](),
    "sinks/deferred": {"sinks/writer"},
    "sinks/files": {"sinks/committer", "sinks/sql", "sinks/write_ahead", "sinks/writer"},
    "sinks/kafka": {"sinks/deferred", "sinks/writer"},
    "sinks/mysql": {"sinks/prepared", "sinks/sql", "sinks/write_ahead"},
    "sinks/postgres": {"sinks/prepared", "sinks/sql", "sinks/write_ahead"},
    "sinks/prepared": {"sinks/committer", "sinks/write_ahead", "sinks/writer"},
    "sinks/redis": {"sinks/write_ahead"},
    "sinks/sql": set[str](),
    "sinks/write_ahead": {"sinks/committer", "sinks/deferred", "sinks/writer"},
    "sinks/writer": set[str](),
    "state": set[str](),
    "state/tiered": {"state"},
    "testing": {"testing/broker"},
    "testing/broker": {"testing/clock"},
    "testing/clock": set[str](),
    "testing/cluster": set[str](),
    "testing/refusals": set[str](),
    "testing/sink_contract": {"testing/clock", "testing/cluster", "testing/refusals"},
    "testing/source_contract": {"testing/cluster", "testing/refusals"},
    "testing/state_contract": {"testing/refusals"},
    "testing/storage_contract": {"testing/cluster", "testing/refusals"},
}
"""By room: the rooms of the same package that it may import; with a folder, the rooms that are modules of it."""
CROSSINGS = {
    ("checkpoint/records/history", "checkpoint"): "the one place that knows what a manifest stands on",
    ("engines/leader", "engines/bounded"): "the leader makes the replay repair, once it has a log",
    ("engines/leader", "engines/erasing"): "the leader finishes the deletion of a run that was cancelled",
    ("engines/leader", "engines/savepoints"): "the leader restores a savepoint before its first attempt",
    ("engines/bounded/replay/replay_repair", "engines/spark"): "`--repair spark` starts a Spark when there is a loss",
}
"""By (module, room): why it may import that room all the same."""
BEHIND_A_SEAM = {
    "checkpoint.store.blocks": {"engines/blocks.py"},
    "checkpoint.store.files": {"engines/blocks.py", "engines/savepoints/exported.py"},
    "connectors.kafka.range_reader": {
        f"engines/spark/source/{name}.py" for name in ("ranges", "reading", "stream_reading")
    },
    "connectors.kafka.reader": {"engines/local/clients.py"},
    "connectors.kafka.source": set[str](),
    **{f"sinks.{store}": {"engines/spark/sink/target.py"} for store in ("mysql", "postgres", "redis")},
    "sinks.files": {"engines/spark/sink/target.py", "engines/surroundings/stores.py"},
    "sinks.print_sink": set[str](),
    "state.hash_map": {"engines/backends.py"},
    "state.tiered": {"engines/backends.py"},
    "state.interval": set[str](),
    "state.snapshot": set[str](),
    "state.table": set[str](),
}
"""By module that implements a seam: the place in engines and commands that chooses it, or is about Kafka alone."""
PURE_FOLDERS = (
    *("checkpoint", "checkpoint/chandy_lamport", "checkpoint/commits", "checkpoint/records", "checkpoint/transactions"),
    "state",
)
PURE = [
    *("__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib"),
    *("heapq", "io", "itertools", "math", "operator", "re", "types", "typing", "zlib"),
    *("fastavro", "msgspec"),  # encoders: bytes in, values out
    *("exactlyonce.pipeline", *(f"exactlyonce.{folder.replace('/', '.')}" for folder in PURE_FOLDERS)),
]
"""What a module of a pure folder may import: no client, thread, clock or source of randomness."""
MODULES_MAX = 16
LARGER = {
    "pipeline": "one vocabulary, which users import from one place; its modules are small, each named after a word"
}
"""By folder: why it may hold more modules."""


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


def room_of(module: Path) -> str:
    """The room in which a module is."""
    places = [module, *module.parents]
    return next(str(place) for place in places if str(place) in ROOMS or len(place.parts) == 1)


def may_enter(room: str, other: str) -> bool:
    """Whether modules of *room* may import *other*, by the table."""
    allowed = ROOMS.get(room, set())
    return other in (room, *allowed) or (not (ROOT / other).is_dir() and str(Path(other).parent) in (room, *allowed))


def test_arrows_point_one_way_between_rooms(repository: list[Path]) -> None:
    """Within a package a room imports only rooms that its row names, but for the crossings that are listed."""
    wrong = [
        f"{path}:{line}: {room_of(path.with_suffix(''))} must not import {module}"
        for path in python_files(repository, *MAY_IMPORT)
        for line, module in imports(path)
        if is_part_of(module, f"exactlyonce.{path.parts[0]}")
        for other in [room_of(Path(*module.split(".")[1:]))]
        if not may_enter(room_of(path.with_suffix("")), other)
        and not any(str(path.with_suffix("")) == one and Path(other).is_relative_to(two) for one, two in CROSSINGS)
    ]
    assert wrong == []


def test_engines_know_the_seams_alone(repository: list[Path]) -> None:
    """Engines and commands import the interface of a seam; who implements it is chosen in one place."""
    wrong = [
        f"{path}:{line}: {module}"
        for path in python_files(repository, "engines", "cli")
        for line, module in imports(path)
        for behind, places in BEHIND_A_SEAM.items()
        if is_part_of(module, f"exactlyonce.{behind}") and str(path) not in places
    ]
    assert wrong == []


def test_the_table_of_rooms_is_whole() -> None:
    """Every folder of modules that has others beside it has a row, and every row is a folder or a module."""
    folders = {
        str(path.parent.relative_to(ROOT)) for name in MAY_IMPORT for path in ROOT.glob(f"{name}/**/__init__.py")
    }
    divided = {folder for folder in folders if any(other.startswith(f"{folder.split('/')[0]}/") for other in folders)}
    assert {room for room in ROOMS if (ROOT / room).is_dir()} == divided - {"cli/commands/starter"}
    assert [room for room in ROOMS if not (ROOT / room).is_dir() and not (ROOT / f"{room}.py").is_file()] == []


def test_pure_folders_do_no_io(repository: list[Path]) -> None:
    """The modules of a pure folder import no client, thread, clock or source of randomness."""
    wrong = [
        f"{path}:{line}: {module}"
        for path in pure_files(repository)
        for line, module in imports(path)
        if not any(is_part_of(module, pure) for pure in PURE) or is_part_of(module, "exactlyonce.checkpoint.store")
    ]
    assert wrong == []


def test_only_the_store_of_the_protocol_does_io() -> None:
    """All folders of checkpoint/ but its store are pure."""
    folders = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("checkpoint/**/__init__.py")}
    assert folders - set(PURE_FOLDERS) == {"checkpoint/store", "checkpoint/store/files"}


def test_importing_what_is_pure_loads_no_client(repository: list[Path]) -> None:
    """What pure folders import of other packages brings in no Kafka client either."""
    modules = [f"exactlyonce.{'.'.join(path.with_suffix('').parts)}" for path in pure_files(repository)]
    code = f"import sys, {', '.join(modules)}; print({{'confluent_kafka', 'kafka', 'pyspark'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def pure_files(repository: list[Path]) -> list[Path]:
    """The modules of the pure folders."""
    files = [path for path in repository if path.suffix == ".py" and str(path.parent) in PURE_FOLDERS]
    return [path for path in files if path.name != "__init__.py"]


def test_every_package_has_a_door_plate(repository: list[Path]) -> None:
    """The docstring of each `__init__` names the folders below it, and says what may be imported from where."""
    wrong = []
    for path in python_files(repository, *MAY_IMPORT):
        if path.name == "__init__.py":
            plate = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
            rooms = [each.parent.name for each in (ROOT / path.parent).glob("*/__init__.py")]
            missing = [f"names no {room}/" for room in rooms if not re.search(rf"\b{room}/", plate)]
            missing += ["does not say what may be imported"] if "import" not in plate else []
            wrong += [f"{path}: its docstring {each}" for each in missing]
    assert wrong == []


def test_a_folder_can_be_kept_in_the_head(repository: list[Path]) -> None:
    """No folder of a package holds more than 16 modules, but for those that are listed."""
    modules = [path for path in python_files(repository, *MAY_IMPORT) if path.name != "__init__.py"]
    counts = Counter(str(path.parent) for path in modules)
    assert {folder: count for folder, count in counts.items() if count > MODULES_MAX and folder not in LARGER} == {}
