"""Figures and tables for people."""

from __future__ import annotations

import doctest

from exactlyonce.cli import arguments, text
from exactlyonce.cli.commands import run


def test_examples() -> None:
    for module in (arguments, run, text):
        result = doctest.testmod(module)
        assert (result.failed, result.attempted > 0) == (0, True)
