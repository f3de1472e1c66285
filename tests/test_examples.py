"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path

import pytest

import exactlyonce

ROOT = Path(exactlyonce.__file__).parents[1]
FILES = [Path(folder, name) for folder, _, names in os.walk(ROOT / "exactlyonce", followlinks=True) for name in names]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted(FILES)
    if file.suffix == ".py" and file.name != "__init__.py" and " >>> " in file.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert (result.failed, result.attempted > 0) == (0, True)
