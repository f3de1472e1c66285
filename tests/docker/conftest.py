"""The rigs of the container tests: servers in containers, and the contract of tables."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "docker" / "rig"), str(TESTS / "sinks" / "rig")]
