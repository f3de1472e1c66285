"""`exactlyonce completion`: a script that completes commands, options, choices and files in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from exactlyonce.cli.arguments import Parser, set_command

_EXAMPLES = """\
Print a script for a shell, which then completes commands, options, choices and files.

examples:
  source <(exactlyonce completion bash)
  exactlyonce completion bash > ~/.local/share/bash-completion/completions/exactlyonce
  exactlyonce completion zsh > ~/.zfunc/_exactlyonce
  exactlyonce completion fish > ~/.config/fish/completions/exactlyonce.fish

The first line is for this shell alone, the others for each new one. zsh needs the folder in
its $fpath. Print it again after an upgrade.
"""
SHELLS = ("bash", "zsh", "fish")
_FILES = {"FILE": "FILE", "DIR": "DIR", "PATH": "DIR"}
"""What completes an argument with this metavar: an attribute of shtab."""


def add(parser: Parser) -> None:
    set_command(parser, "SHELL", _EXAMPLES, completion)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def completion(args: argparse.Namespace) -> int:
    import shtab

    root = args.whole()
    for action in _actions(root):
        if kind := _FILES.get(str(action.metavar)):
            action.complete = getattr(shtab, kind)  # type: ignore[attr-defined]  # shtab looks there
    print(shtab.complete(root, args.shell))
    return 0


def _actions(parser: Parser) -> Iterator[argparse.Action]:
    """The actions of *parser* and of its commands."""
    for action in parser._actions:
        yield action
        for below in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _actions(below)
