"""The command of the crash matrix; see `matrix`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
ENGINES, POSTGRES = HERE.parent / "engines", HERE.parent / "sinks" / "postgres" / "rig"

if __name__ == "__main__":
    sys.path[:0] = map(str, (HERE / "rig", ENGINES, POSTGRES))
    from matrix import main

    sys.exit(main())
