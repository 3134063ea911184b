"""`python -m in_namespace NAMESPACE WORDS...`: `swarmnet WORDS...` in that network namespace, fed slowly."""

from __future__ import annotations

import sys

import fed_slowly
from benchmark_modules import load

PAUSE_S = 0.1

if __name__ == "__main__":
    load("links").enter(sys.argv.pop(1))
    fed_slowly.run(PAUSE_S)
