"""The bytecode of tests and packages, made by one process, while it starts the broker.

Worker processes of xdist import the same files in the same order at the same time: each would compile all of them.
"""

from __future__ import annotations

import sys
from compileall import compile_file
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from _pytest.assertion import rewrite


class Bytecode:
    """A pytest plugin: no worker process begins before all is compiled."""

    def __init__(self, config: pytest.Config) -> None:
        self._thread = Thread(target=compile_all, args=(config,), daemon=True)
        if config.getoption("numprocesses", None) and not sys.dont_write_bytecode:
            self._thread.start()

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_configure_node(self, node: Any) -> None:
        if self._thread.ident is not None:
            self._thread.join()


def compile_all(config: pytest.Config) -> None:
    """Compile each changed file below the root, tests as pytest does. A syntax error is left to the import."""
    for folder in config.rootpath.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            for path in folder.rglob("*.py"):
                if path.name.startswith("test_") or path.name == "conftest.py":
                    with suppress(SyntaxError):
                        _compile_test(path, config)
                else:
                    compile_file(path, quiet=2)


def _compile_test(path: Path, config: pytest.Config) -> None:
    """The same file that pytest's import hook writes, which has no public function for it."""
    cached = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, cached) is None and rewrite.try_makedirs(cached.parent):
        status, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, cached)
