"""Child processes that do not outlive the thread that started them, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """*command*, whose first word is a path, so that the kernel kills it together with the thread that starts it."""
    return [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
