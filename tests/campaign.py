"""The command of each campaign on real servers: `python tests/campaign.py histories --help`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CAMPAIGNS = {
    "changes-kills": "change_kills", "crash-matrix": "matrix", "histories": "histories", "soak": "real_soak"
}  # fmt: skip
"""The module of each, which imports others by name, as tests do."""


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in CAMPAIGNS:
        print(f"usage: campaign.py {{{','.join(CAMPAIGNS)}}} ...", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    sys.argv[0] += f" {name}"  # the usage names it
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sys.path[:1] = [str(ROOT / folder) for folder in project["tool"]["pytest"]["ini_options"]["pythonpath"]]
    code: int = import_module(CAMPAIGNS[name]).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
