"""bench/ holds scripts, which find each other beside themselves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
