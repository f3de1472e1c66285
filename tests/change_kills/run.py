"""The command of kills of captured changes; see `change_kills`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
ENGINES, WAITING = HERE.parent / "engines", HERE.parent / "testing" / "rig"

if __name__ == "__main__":
    sys.path[:0] = map(str, (HERE / "rig", ENGINES, WAITING))
    from change_kills import main

    sys.exit(main())
