"""What it takes to begin: `import swarmnet` and `swarmnet --help`, in fresh processes, beside a bare interpreter.

    python benchmarks/startup.py [--turns N] [--json FILE]

Seconds of CPU (user and system, of the child), the median of turns that take turns; torch is imported by none of them
(`tests/test_import_weight.py`). On a quiet machine seconds of the clock are the same: each is one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAYS = {"bare": ["-c", ""], "import": ["-c", "import swarmnet"], "help": ["-m", "swarmnet", "--help"]}


def cpu_s(args: list[str]) -> float:
    """Of a child. Raises CalledProcessError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *args], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the medians there, too")
    typed = parser.parse_args()
    if typed.turns < 1:
        parser.error("--turns must be 1 or more")
    turns = [{way: cpu_s(args) for way, args in WAYS.items()} for _ in range(typed.turns)]
    found = {way: statistics.median(turn[way] for turn in turns) for way in WAYS}
    print("  ".join(f"{way} {seconds:.3f} s" for way, seconds in found.items()))
    if typed.json:
        typed.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
