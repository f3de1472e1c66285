"""The script of `exactlyonce completion` completes in a real shell."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from exactlyonce.cli.commands.completion import SHELLS
from tests.cli.conftest import Command

Completed = Callable[[str], set[str]]
_ASK = """\
source {script}
COMP_WORDS=({words}) COMP_CWORD={last}
_shtab_exactlyonce
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def completed(command: Command, tmp_path: Path) -> Completed:
    """What bash offers at the end of a line, with the script loaded."""
    ended = command("completion", "bash")
    assert ended.code == 0
    script = tmp_path / "script"
    script.write_text(ended.out)
    (tmp_path / "production.toml").touch()

    def ask(line: str) -> set[str]:
        words = line.split(" ")
        text = _ASK.format(script=script, words=" ".join(map(shlex.quote, words)), last=len(words) - 1)
        done = subprocess.run(
            ["bash", "--norc", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
        )
        return {*filter(None, done.stdout.splitlines())}

    return ask


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("exactlyonce ru", {"run"}),
        ("exactlyonce save", {"savepoint", "savepoints"}),
        ("exactlyonce savepoints ", {"list", "verify", "delete"}),
        ("exactlyonce completion ", set(SHELLS)),
        ("exactlyonce run orders:pipeline --par", {"--param", "--parallelism"}),
        ("exactlyonce run orders:pipeline --log-level e", {"error"}),
        ("exactlyonce run orders:pipeline --mode at", {"at_least_once"}),
        ("exactlyonce run orders:pipeline --config prod", {"production.toml"}),
    ],
)
def test_bash_completes(completed: Completed, line: str, offered: set[str]) -> None:
    """Commands, actions, options, choices and files."""
    assert completed(line) >= offered
    assert all(word.startswith(line.rpartition(" ")[2]) for word in completed(line))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_of_its_shell(command: Command, shell: str, tmp_path: Path) -> None:
    """A shell that is here reads it without running it."""
    ended = command("completion", shell)
    assert (ended.code, ended.err) == (0, "")
    assert "checkpoint-interval" in ended.out
    (tmp_path / "script").write_text(ended.out)
    if shutil.which(shell):
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)
