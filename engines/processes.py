"""Processes of this machine: that of an incarnation, which may be known to be dead, and this one."""

from __future__ import annotations

import os
import socket
import sys
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
    """The incarnation that seems alive at *now_ms*: that of `History.living`, unless it `has_ended`."""
    newest = history.living(now_ms)
    return None if newest is None or has_ended(newest) else newest


def is_known_dead(incarnation: Incarnation) -> bool:
    """Whether it `has_ended`, or was of this process, which begins anew."""
    return (incarnation.host, incarnation.process, incarnation.machine) == this_process() or has_ended(incarnation)
