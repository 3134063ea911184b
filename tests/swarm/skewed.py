"""`python -m skewed FILE WORDS...`: `swarmnet WORDS...` where the clock is set by as many seconds as FILE says.

Only `time.time` is: all other clocks go on.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path


def run(path: Path) -> None:
    """`swarmnet`, with the words of this process."""
    real = time.time
    time.time = lambda: real() + float(path.read_text())
    runpy.run_module("swarmnet", run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv.pop(1)))
