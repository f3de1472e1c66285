"""The rig of these tests: a network of processes, the graphs and schedules that it is given, its planted defects."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "rig"))
