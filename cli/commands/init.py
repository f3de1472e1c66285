"""`exactlyonce init`: writes the files of `starter/`, all or none, and overwrites no file."""

from __future__ import annotations

import argparse
import os
from importlib.resources import files
from pathlib import Path

from exactlyonce.cli.arguments import Parser, set_command
from exactlyonce.pipeline.errors import ConfigError

OWN_SERVERS = "127.0.0.1:9092"
"""Where `exactlyonce broker start` listens, and `feed.py` and `show.py` look unless the environment says otherwise."""
FILES = ("pipeline.py", "feed.py", "show.py", "README.md")

_EXAMPLES = """\
Write a first pipeline, with scripts that feed it and show its output.

examples:
  exactlyonce init            here
  exactlyonce init totals     into a folder, which is created
"""


def add(parser: Parser) -> None:
    set_command(parser, "[DIR]", _EXAMPLES, init)
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path(), help="where (default: here)")


def init(args: argparse.Namespace) -> int:
    from exactlyonce.engines.configuration import BOOTSTRAP_VARIABLE

    folder: Path = args.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}. Name another folder.") from None
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise ConfigError(f"{folder}/ has {', '.join(existing)} already: nothing was written. Name another folder.")
    servers = os.environ.get(BOOTSTRAP_VARIABLE) or OWN_SERVERS
    for name in FILES:
        text = files("exactlyonce.cli.commands.starter").joinpath(name).read_text(encoding="utf-8")
        with open(folder / name, "x", encoding="utf-8") as file:
            file.write(_at(servers, text) if name == "README.md" else text)
    print(f"Wrote {', '.join(FILES)}. Next:\n")
    if folder != Path():
        print(f"  cd {folder}")
    if servers == OWN_SERVERS:
        print("  exactlyonce broker start")
    print("  python feed.py")
    print(f"  exactlyonce run pipeline:pipeline --bootstrap-servers {servers}")
    return 0


def _at(servers: str, readme: str) -> str:
    """The text of *readme* for a cluster at *servers*: it starts a broker only if the environment names none."""
    if servers == OWN_SERVERS:
        return readme
    kept = [line for line in readme.splitlines(keepends=True) if "`exactlyonce broker" not in line]
    text = "".join(line for line in kept if not line.startswith("exactlyonce broker"))
    return text.replace(" To end the broker:\n", "\n").replace(OWN_SERVERS, servers)
