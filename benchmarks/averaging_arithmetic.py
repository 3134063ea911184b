"""What a member's arithmetic in one averaging round takes, without transport: for `benchmarks/averaging.py`.

A member of N encodes its contribution, reduces one N-th of the vector from N contributions, puts all of the result into
its sum buffer, which hashes it, and seals it. Measured is CPU time on one thread, by the kernels and by the reference
in turns, per 1B parameters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import torch
from averaging_ours import VectorSum

from swarmnet.averaging.parts import MOST_CHUNK, chunks, parts
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.stage.interfaces import Contribution
from swarmnet.wire import kernel_build, kernels

STEPS = ("contribution", "reduce", "put", "seal")
T = TypeVar("T")


def measure_arithmetic(codec: str, members: int, parameters: int, turns: int) -> dict[str, Any]:
    """CPU seconds per 1B parameters of each of `STEPS`, the fastest of its turns, and ratios to the reference's."""
    torch.set_num_threads(1)
    kernel_build.prepare(threads=1).join()
    found = asyncio.run(_both(codec, members, parameters, turns))
    whole = {way: round(sum(seconds.values()), 2) for way, seconds in found.items()}
    return {
        "codec": codec,
        "peers": members,
        "parameters": parameters,
        **{way: {step: round(s, 2) for step, s in seconds.items()} for way, seconds in found.items()},
        "whole": whole,
        "vs_reference": round(whole["kernels"] / whole["reference"], 3),
    }


def show_arithmetic(row: dict[str, Any]) -> None:
    """A line of the whole, then of its steps."""
    before, after = row["whole"]["reference"], row["whole"]["kernels"]
    print(
        f"arithmetic of a member of {row['peers']}, {row['codec']}: {after:.1f} s of a CPU per 1B parameters, "
        f"reference {before:.1f} s, ratio {row['vs_reference']:.2f}"
    )
    for way in ("kernels", "reference"):
        print(f"    {way:10}" + ", ".join(f"{step} {row[way][step]:.2f}" for step in STEPS), flush=True)


async def _both(codec: str, members: int, parameters: int, turns: int) -> dict[str, dict[str, float]]:
    vector = torch.randn(parameters, generator=torch.Generator().manual_seed(0))
    compute, native = ComputeThread(), kernels.used()
    best = {way: dict.fromkeys(STEPS, float("inf")) for way in ("kernels", "reference")}
    try:
        sums = VectorSum(vector, codec, compute)
        for turn in range(turns + 1):  # the first one warms up, and can only lose
            for way, seconds in best.items():
                kernels.use(native if way == "kernels" else None)
                for step, taken in (await _turn(sums, members, parameters, turn)).items():
                    seconds[step] = min(seconds[step], taken * 1e9 / parameters)
    finally:
        kernels.use(native)
        compute.close()
    return best


async def _turn(sums: VectorSum, members: int, parameters: int, turn: int) -> dict[str, float]:
    taken = dict.fromkeys(STEPS, 0.0)

    async def timed(step: str, job: Awaitable[T]) -> T:
        began = time.process_time()
        found = await job
        taken[step] += time.process_time() - began
        return found

    await sums.open_round(RoundId(Ballot(1, PeerId("a")), turn))
    await sums.open_sum()
    cut = [chunk for part in parts(parameters, [0] * members, block=sums.block) for chunk in chunks(*part, MOST_CHUNK)]
    mine = parts(parameters, [0] * members, block=sums.block)[0]
    for start, stop in cut:
        packed = await timed("contribution", sums.contribution(start, stop))
        # Others reduce the rest as I do mine; that is their time.
        is_mine = start < mine[1]
        given = [Contribution(PeerId(str(member)), 1, packed) for member in range(members)]
        reduced = await (
            timed("reduce", sums.reduce(given, start, stop)) if is_mine else sums.reduce(given, start, stop)
        )
        await timed("put", sums.put(start, reduced.packed))
    await timed("seal", sums.seal())
    return taken
