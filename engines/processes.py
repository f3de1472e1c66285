"""Processes of this machine: an incarnation's, which may be known to be dead, and this one."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Incarnation

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = "/proc/self/ns/pid"

_SUPERVISORS = ("INVOCATION_ID", "NOTIFY_SOCKET", "KUBERNETES_SERVICE_HOST")
"""The variables that systemd and Kubernetes set."""


def is_supervised() -> bool:
    """Whether systemd, Kubernetes or a container has started this process, and nobody watches it in a terminal."""
    watched = sys.stderr is not None and sys.stderr.isatty()
    return not watched and (os.getpid() == 1 or any(name in os.environ for name in _SUPERVISORS))


def machine() -> str:
    """The scope of this process's id: the boot of the machine, and the namespace of process ids.

    Two machines or containers may share a host name, so that is only used where Linux's names are missing.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PROCESS_IDS)}"
    except OSError:
        return socket.gethostname()


def this_process() -> tuple[str, int, str]:
    return socket.gethostname(), os.getpid(), machine()


def has_ended(incarnation: Incarnation) -> bool:
    """Whether its process was on this machine and is gone."""
    if (incarnation.machine, incarnation.host) != (machine(), socket.gethostname()):  # copies of one share its boot
        return False
    try:
        os.kill(incarnation.process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # somebody else's: it runs
    return False


def living(history: History, now_ms: int) -> Incarnation | None:
    """The incarnation that seems alive at *now_ms*: `History.living`, unless it `has_ended`."""
    newest = history.living(now_ms)
    return None if newest is None or has_ended(newest) else newest


def is_known_dead(incarnation: Incarnation) -> bool:
    """Whether it `has_ended`, or was of this process, which begins anew."""
    return (incarnation.host, incarnation.process, incarnation.machine) == this_process() or has_ended(incarnation)


THRESHOLDS = (8_000, 3, 1)
"""As many new objects between two full collections as Python's own (700, 10, 10), with fewer collections: reference
counts free most objects of a batch first. Higher ones, or a `gc.freeze` at each checkpoint, would pile up cycles."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect rarely, and skip the objects that exist now: modules, restored state."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def not_collecting() -> Iterator[None]:
    """No collection: for work that makes many objects and no cycles, which would be visited again and again."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class UnitCollector:
    """The collector of a process that runs one unit after the other.

    A full collection looks at all modules, which takes longer than a small unit. So modules are frozen at the first
    unit, once a process; each later one collects only the objects made since, which other units have left.
    """

    def __init__(self) -> None:
        self._frozen = False

    @contextmanager
    def collecting_rarely(self) -> Iterator[None]:
        """Collect what earlier units have left, then rarely; the objects of the first unit's beginning stay frozen."""
        before = gc.get_threshold()
        gc.collect()
        if not self._frozen:
            gc.freeze()
            self._frozen = True
        gc.set_threshold(*THRESHOLDS)
        try:
            yield
        finally:
            gc.set_threshold(*before)

    def unfreeze(self) -> None:
        """Give all objects back to Python's own collections."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
