"""`exactlyonce init`: writes the files of `starter/`, all or none, and never over another file."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from exactlyonce.cli.arguments import Commands, add_command
from exactlyonce.pipeline.errors import ConfigError

FILES = ("pipeline.py", "feed.py", "show.py", "README.md")

_EXAMPLES = """\
Write a pipeline to start from, with scripts that feed it and show what it wrote.

examples:
  exactlyonce init            here
  exactlyonce init totals     into a folder, which is created
"""


def add(commands: Commands) -> None:
    """The parser."""
    parser = add_command(commands, "init", "[DIR]", "write a pipeline to start from", _EXAMPLES, init)
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path(), help="where (default: here)")


def init(args: argparse.Namespace) -> int:
    """Write them, and say what to do next."""
    folder: Path = args.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made a folder: {error.strerror}. Name another one.") from None
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise ConfigError(f"{folder}/ has {', '.join(existing)} already: nothing was written. Name another folder.")
    for name in FILES:
        with open(folder / name, "x", encoding="utf-8") as file:
            file.write(files("exactlyonce.cli.commands.starter").joinpath(name).read_text(encoding="utf-8"))
    print(f"Wrote {', '.join(FILES)}. Next:\n")
    if folder != Path():
        print(f"  cd {folder}")
    print("  exactlyonce broker start")
    print("  python feed.py")
    print("  exactlyonce run pipeline:pipeline --bootstrap-servers 127.0.0.1:9092")
    return 0
