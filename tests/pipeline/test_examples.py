"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import exactlyonce.pipeline

MODULES = [module.name for module in pkgutil.iter_modules(exactlyonce.pipeline.__path__, "exactlyonce.pipeline.")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
