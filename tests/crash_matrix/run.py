"""The command of the crash matrix; see `matrix`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
RIGS = [HERE.parent / folder for folder in ("crash_matrix/rig", "engines", "sinks/postgres/rig", "spark/rig")]

if __name__ == "__main__":
    sys.path[:0] = map(str, RIGS)
    from matrix import main

    sys.exit(main())
