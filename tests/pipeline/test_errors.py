"""The tree of errors."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import re
from collections.abc import Iterator

import pytest

import exactlyonce
from exactlyonce.checkpoint.block_storage import DamagedBlock, UnreadableBlock
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline import errors
from exactlyonce.pipeline.errors import ExactlyOnceError, InvariantViolation, require

PACKAGES = ("pipeline", "checkpoint", "state", "connectors", "sinks", "engines", "cli")


def all_errors() -> list[type[ExactlyOnceError]]:
    """Every error of every shipped module, the root first."""
    for module in pkgutil.walk_packages(exactlyonce.__path__, "exactlyonce."):
        if module.name.split(".")[1] in PACKAGES and ".starter" not in module.name:
            importlib.import_module(module.name)
    found = [ExactlyOnceError]
    for each in found:
        found += [sub for sub in each.__subclasses__() if sub.__module__.startswith("exactlyonce.")]
    return found


def drawn() -> Iterator[tuple[str, str, str]]:
    """(error, the one above it, module unless it is this one) of every line of the drawing."""
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[│ ]   )*(?:[├└]── )?)(\w+)(?: +([a-z_.]+):)?", line)
        if match:
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            yield match[2], above[depth - 1] if depth else "", match[3] or "pipeline.errors"


def test_the_drawing_is_the_tree() -> None:
    tree = {
        (each.__name__, base.__name__ if (base := each.__base__) is not Exception else "", module)
        for each in all_errors()
        for module in [each.__module__.removeprefix("exactlyonce.")]
        if each.__base__
    }
    assert set(drawn()) == tree


def test_errors_survive_pickling() -> None:
    given = ["what happened", BlockRef(1, 2, "key", 3, b"")]
    for kind in all_errors():
        error = kind(*given[: 2 if kind in (DamagedBlock, UnreadableBlock) else 1])
        arrived = pickle.loads(pickle.dumps(error))
        assert (type(arrived), str(arrived)) == (kind, "what happened")


def test_a_broken_rule_is_a_defect() -> None:
    require(True, "Nothing happens")
    with pytest.raises(InvariantViolation, match=r"Ids only grow\. This is a defect of exactlyonce"):
        require(0, "Ids only grow")
