"""The programs and libraries of servers, found on this machine, or a test that is skipped with what to install."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path.home() / ".cache" / "exactlyonce"
"""The folder of what is downloaded once per user."""


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


def downloaded(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder *name* of `CACHE`; if it is missing, *fill* makes it under the path that it is given."""
    folder = CACHE / name
    if not folder.is_dir():
        part = folder.with_name(f"{name}.part-{os.getpid()}")
        fill(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


def maven(goal: Sequence[str], folder: Path, not_tested: str) -> None:
    """Have Maven do *goal* in *folder*; skips the test, with *not_tested*, where that fails."""
    program = shutil.which("mvn")
    if program is None:
        pytest.skip(f"{not_tested}: its server comes by Maven, and there is no mvn")
    done = subprocess.run([program, "-q", "-B", *goal], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{not_tested}: Maven could not get its server: {done.stdout[-500:]}")


def copy_jars(artifacts: Iterable[str], to: Path, folder: Path, not_tested: str, *, with_needed: bool = True) -> None:
    """Copy jars to *to*, and unless it is said those they need. *artifacts*: each as ``GROUP:NAME:VERSION``, maybe with
    ``:CLASSIFIER``; *folder*: an empty one."""
    rest = "" if with_needed else f"<exclusions><exclusion>{_tags('*', '*')}</exclusion></exclusions>"
    listed = "".join(f"<dependency>{_tags(*artifact.split(':'))}{rest}</dependency>" for artifact in artifacts)
    (folder / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>'
        f"<artifactId>x</artifactId><version>1</version><dependencies>{listed}</dependencies></project>"
    )
    maven(["dependency:copy-dependencies", f"-DoutputDirectory={to}"], folder, not_tested)


def _tags(*parts: str) -> str:
    """The parts of an artifact as Maven's XML has them."""
    names = "groupId", "artifactId", "version", "classifier"
    return "".join(f"<{name}>{part}</{name}>" for name, part in zip(names, parts, strict=False))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP: the sockets of the process are open, and it answers nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
