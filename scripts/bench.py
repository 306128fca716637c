"""Run `python -m benchmarks` of this repository from any folder. See its --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.__main__ import main

if __name__ == "__main__":
    main()
