"""The command of histories of killed pipelines; see `histories`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    sys.path[:0] = map(str, (HERE / "rig", HERE.parent / "engines"))
    from histories import main

    sys.exit(main())
