"""Random faults from seeds that no run has had: `python tests/sim/new_seeds.py --minutes 60`, as CI does each night.

The first seed is the date followed by 000. Each seed runs every kind of test_sim_random.py, with `exact` and `overlap`
steps. A failure is printed and written with its shrunk schedule; the exit code is 1 after any.
`--kind KIND --start SEED --minutes 0` repeats one.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from test_sim_random import KINDS, run  # noqa: E402

BASE = dict(KINDS)


def failure(kind: str, sync: str, seed: int) -> str:
    """What went wrong, or "" if nothing did."""
    plan, chaos = BASE[kind]
    KINDS[kind] = replace(plan, sync=sync), chaos
    try:
        run(kind, seed)
    except Exception:
        return f"{sync} {kind}: --kind {kind} --start {seed} --minutes 0\n{traceback.format_exc()}\n"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=int(f"{datetime.now(UTC):%Y%m%d}000"), help="the first seed")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no other seed after so many; 0: one seed")
    parser.add_argument("--kind", choices=BASE, help="this kind alone")
    parser.add_argument("--failures", type=Path, help="file for the failing seeds")
    asked = parser.parse_args()
    end, runs, failed = time.monotonic() + 60 * asked.minutes, 0, 0
    for seed in count(asked.start):
        for kind in [asked.kind] if asked.kind else BASE:
            for sync in ("exact", "overlap"):
                runs += 1
                if found := failure(kind, sync, seed):
                    failed += 1
                    print(found, flush=True)
                    if asked.failures:
                        with asked.failures.open("a", encoding="utf-8") as file:
                            file.write(found)
        if time.monotonic() >= end:
            print(f"{runs} runs of seeds {asked.start} to {seed}: {failed} failed")
            return 1 if failed else 0
    raise AssertionError("seeds do not end")


if __name__ == "__main__":
    sys.exit(main())
