"""Whoever takes an old copy and applies the sums that a donor has kept since ends with the donor's bits, in torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from stage_chain import StageChain, compute_thread, take_over, tiny

from swarmnet.averaging.exchange import pieces
from swarmnet.averaging.replay_log import ReplayLog
from swarmnet.ids import Chain
from swarmnet.messages import Commit, Finished, Part, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend

STAGE, COPIED, LAST = 1, 2, 6


def stamp(step: int) -> Stamp:
    return Stamp(step, STAGE, Chain(""))


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
async def test_an_old_copy_and_the_kept_sums_make_the_new_state(mode: str) -> None:
    async with compute_thread() as compute:
        manifest = tiny(2, mode=mode)
        chain, rng = StageChain(manifest, compute), random.Random(3)
        donor = chain.engines[STAGE][0]
        joiner = torch_engine(manifest, STAGE, compute, DeviceBackend(manifest.of_stage(STAGE)))
        cut = pieces(0, donor.sums.num_elements, donor.sums.num_elements // 3 + 1)
        trail = ReplayLog(donor.sums)
        apply = donor.apply

        async def watched(commits: Sequence[Commit]) -> None:
            mine = commits[STAGE]
            finished = Finished(mine.id, mine.digest, mine.num_tokens, mine.loss_sum, mine.grad_sq_norm, ())
            await apply(commits)
            trail.hold(stamp(mine.step), finished, cut)
            trail.applied(tuple(commits))

        donor.apply = watched  # type: ignore[method-assign]
        copy = b""
        for step in range(LAST):
            if step == COPIED:
                trail.wanted()
                copy = bytes(await donor.snapshot())
            await trail.leave(stamp(step))
            await chain.step(rng)

        await joiner.restore(copy, version=COPIED)
        assert await joiner.snapshot() != await donor.snapshot()
        for step in range(COPIED, LAST):
            told = trail.step(stamp(step))
            assert told is not None and told.finished is not None
            parts = []
            for start, stop in cut:
                kept = trail.piece(Part(stamp(step), told.finished.id, "sum", start, stop))
                parts.append(kept.payload[0] if kept else await donor.sums.finished_sum(start, stop))
            digest, norm = await take_over(joiner.sums, *parts)
            assert (digest, norm) == (told.commits[STAGE].digest, told.commits[STAGE].grad_sq_norm)
            await joiner.apply(told.commits)
        assert await joiner.snapshot() == await donor.snapshot(), "weights and moments, bit by bit"
