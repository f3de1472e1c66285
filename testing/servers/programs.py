"""The programs and libraries of servers, found on this machine, or a test that is skipped with what to install."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from typing import NoReturn

import pytest


def programs(*names: str, package: str, places: Iterable[str] = ()) -> dict[str, str]:
    """The path of each program, on the PATH or in one of *places*; *package* has them."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *places])
    paths = {name: found for name in names if (found := shutil.which(name, path=path)) is not None}
    if missing := [name for name in names if name not in paths]:
        _missing(f"{', '.join(missing)} of {package} not found on the PATH: install {package}")
    return paths


def require(library: str, install: str) -> None:
    """Skip the test without *library*, which ``pip install`` *install* gets."""
    if importlib.util.find_spec(library) is None:
        _missing(f'{library} is not installed: pip install "{install}"')


def _missing(text: str) -> NoReturn:
    if os.environ.get("CI") or os.environ.get("EXACTLYONCE_REQUIRE_STORES") == "1":
        pytest.fail(text)
    pytest.skip(text)
