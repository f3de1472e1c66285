"""The command of the soak on real servers; see `real_soak`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
ENGINES = HERE.parent / "engines"

if __name__ == "__main__":
    sys.path[:0] = map(str, (HERE / "rig", ENGINES))
    from real_soak import main

    sys.exit(main())
