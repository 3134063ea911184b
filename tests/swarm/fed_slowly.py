"""`python -m fed_slowly PAUSE_S WORDS...`: `swarmnet WORDS...`, whose trainer takes its time before each microbatch.

A swarm that makes steps as fast as it can keeps all cores busy, and shows no more.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Sequence

from swarmnet.ids import PeerId
from swarmnet.pipeline import router
from swarmnet.pipeline.router import Candidate, least_time

SLOWLY = ("fed_slowly", "0.1")
"""What is run with `swarmnet`'s words where a few steps a second are enough."""


def run(pause_s: float) -> None:
    """`swarmnet`, with the words of this process."""

    def slowly(candidates: Sequence[Candidate]) -> PeerId:
        time.sleep(pause_s)
        return least_time(candidates)

    if sys.argv[1] == "trainer":
        router.least_time = slowly
    runpy.run_module("swarmnet", run_name="__main__")


if __name__ == "__main__":
    run(float(sys.argv.pop(1)))
