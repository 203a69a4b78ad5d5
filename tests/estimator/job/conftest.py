"""Makes ``bridge_oracle`` importable for the tests next to it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
