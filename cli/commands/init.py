"""`exactlyonce init`: writes the files of a starter, all or none, and overwrites no file."""

from __future__ import annotations

import argparse
import ast
import os
from importlib.resources import files
from pathlib import Path

from exactlyonce.cli.arguments import Parser, set_command
from exactlyonce.pipeline.errors import ConfigError

OWN_SERVERS = "127.0.0.1:9092"
"""Where `exactlyonce broker start` listens, and `feed.py` and `show.py` look unless the environment says otherwise."""
STARTERS = {
    "totals": ("feed.py", "show.py"),
    "windows": ("feed.py", "show.py"),
    "postgres": ("../totals/feed.py",),
    "changes": (),
    "model": ("train.py", "feed.py", "show.py"),
}
"""The first one is written unless another one is named; each has `FILES` and these."""
FILES = ("pipeline.py", "test_pipeline.py", "README.md")

_EXAMPLES = """\
Write a first pipeline, with a test, and scripts that feed it and show its output.

examples:
  exactlyonce init                              here
  exactlyonce init totals                       into a folder, which is created
  exactlyonce init --list                       what there is to begin with
  exactlyonce init shop --starter postgres      one of them
"""


def add(parser: Parser) -> None:
    set_command(parser, "[DIR] [options]", _EXAMPLES, init)
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path(), help="where (default: here)")
    first, *_ = STARTERS
    help_text = f"what to begin with (default: {first}); see --list"
    parser.add_argument("--starter", metavar="NAME", choices=tuple(STARTERS), default=first, help=help_text)
    parser.add_argument("--list", action="store_true", help="only show what there is to begin with")


def init(args: argparse.Namespace) -> int:
    from exactlyonce.engines.configuration import BOOTSTRAP_VARIABLE

    if args.list:
        for name in STARTERS:
            print(f"{name:<10} {ast.get_docstring(ast.parse(_text(name, 'pipeline.py')))}")
        return 0
    folder: Path = args.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}. Name another folder.") from None
    texts = {path.rpartition("/")[2]: _text(args.starter, path) for path in (*FILES, *STARTERS[args.starter])}
    existing = [name for name in texts if (folder / name).exists()]
    if existing:
        raise ConfigError(f"{folder}/ has {', '.join(existing)} already: nothing was written. Name another folder.")
    texts["README.md"] = readme = _at(os.environ.get(BOOTSTRAP_VARIABLE) or OWN_SERVERS, texts["README.md"])
    for name, text in texts.items():
        with open(folder / name, "x", encoding="utf-8") as file:
            file.write(text)
    print(f"Wrote {', '.join(texts)}. Next:\n")
    if folder != Path():
        print(f"  cd {folder}")
    for line in _commands(readme):
        print(f"  {line}")
    return 0


def _text(starter: str, path: str) -> str:
    return files("exactlyonce.cli.commands.starters").joinpath(starter, path).read_text(encoding="utf-8")


def _commands(readme: str) -> list[str]:
    """The first commands of *readme*, up to the first run, without what is said of them."""
    lines = readme.partition("```sh\n")[2].partition("```")[0].splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("exactlyonce run"))
    return [line.partition("  #")[0].rstrip() for line in lines[: place + 1]]


def _at(servers: str, readme: str) -> str:
    """The text of *readme* for a cluster at *servers*: it starts a broker only if the environment names none."""
    if servers == OWN_SERVERS:
        return readme
    kept = [line for line in readme.splitlines(keepends=True) if "`exactlyonce broker" not in line]
    text = "".join(line for line in kept if not line.startswith("exactlyonce broker"))
    return text.replace(" To end the broker:\n", "\n").replace(OWN_SERVERS, servers)
