"""`python -m in_namespace NAMESPACE WORDS...`: `swarmnet WORDS...` in that network namespace.

A trainer takes its time there: a swarm that makes steps as fast as it can keeps all cores busy, and shows no more.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Sequence

from benchmark_modules import load

from swarmnet.ids import PeerId
from swarmnet.pipeline import router
from swarmnet.pipeline.router import Candidate, least_time

PAUSE_S = 0.1
"""Before each microbatch."""


def slowly(candidates: Sequence[Candidate]) -> PeerId:
    time.sleep(PAUSE_S)
    return least_time(candidates)


if __name__ == "__main__":
    load("links").enter(sys.argv.pop(1))
    if sys.argv[1] == "trainer":
        router.least_time = slowly
    runpy.run_module("swarmnet", run_name="__main__")
