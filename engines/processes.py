"""Processes of this machine: whether the one that led as an incarnation is known to be no more."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from exactlyonce.checkpoint.records.manifest import Incarnation

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_IDS = "/proc/self/ns/pid"


def machine() -> str:
    """The name of the system in which the id of this process counts: its boot, and its namespace of process ids.

    A host's name would not do: two machines, or two containers, may have the same. It stands in where Linux's names are
    not to be had.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PROCESS_IDS)}"
    except OSError:
        return socket.gethostname()


def this_process() -> tuple[str, int, str]:
    """Host, process id and machine, as an incarnation notes them."""
    return socket.gethostname(), os.getpid(), machine()


def is_known_dead(incarnation: Incarnation) -> bool:
    """Whether it was a process of this machine that is no more, or this one, which begins anew."""
    if (incarnation.machine, incarnation.host) != (machine(), socket.gethostname()):  # copies of one share its boot
        return False
    try:
        os.kill(incarnation.process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return incarnation.process == os.getpid()
