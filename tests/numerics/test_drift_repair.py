"""Real weights that a machine has got wrong: measured, found, and taken from a mate."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from stage_chain import StageChain, compute_thread, tiny

from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.ids import Chain, PeerId
from swarmnet.manifest.schema import Averaging
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Heartbeat, Measure, Stamp
from swarmnet.stage import snapshot
from swarmnet.stage.snapshot import digest
from swarmnet.step.drift import Drift, DriftRules, DriftVerdict
from swarmnet.step.host import Deferred
from swarmnet.step.view import View

CHAIN = Chain("1" * 64)
PEERS = tuple(map(PeerId, "abc"))


@dataclass
class Judged:
    verdict: DriftVerdict
    donors: dict[PeerId, tuple[PeerId, ...]]


async def judge(engines: list[TorchEngine]) -> Judged:
    """What replicas with these engines make of each other's heartbeats."""
    drifts = {peer: Drift(View(peer, 0, Timers()), DriftRules(every=1), "cpu", Deferred()) for peer in PEERS}
    for engine, drift in zip(engines, drifts.values(), strict=True):
        version, digest = await engine.measure()
        drift.measured(Measure(version, CHAIN, digest), CHAIN, now=0.0)
    for peer, drift in drifts.items():
        for mate in PEERS:
            if mate != peer:
                measure = drifts[mate].mine
                assert measure is not None
                drift._view.hear(
                    mate,
                    Heartbeat(Stamp(measure.version, 0, CHAIN), 1, True, None, numerics="cpu", measure=measure),
                    now=0.0,
                )
        drift.review(now=0.0)
    verdicts = [drift.verdict for drift in drifts.values()]
    assert verdicts[0] is not None and verdicts[1:] == verdicts[:-1], "all come to the same"
    return Judged(verdicts[0], {peer: found for peer, drift in drifts.items() if (found := drift.donors(now=0.0))})


def weights(engine: TorchEngine) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in engine._state.newest])


@pytest.mark.parametrize("sync", ["exact", "overlap"])
@pytest.mark.parametrize("kind", ["one bit", "noise", "not a number"])
async def test_perturbed_weights_are_found_and_repaired(kind: str, sync: str) -> None:
    async with compute_thread() as compute:
        manifest = tiny(1, averaging=Averaging(sync=sync))
        chain, rng = StageChain(manifest, compute, replicas=3), random.Random(0)
        (engines,) = chain.engines
        await chain.step(rng)
        calm = await judge(engines)
        assert not calm.verdict.strays

        odd = engines[1]
        with torch.no_grad():
            matrix = odd._state.newest[3]
            if kind == "one bit":
                matrix.view(torch.int32)[0, 0] ^= 1
            elif kind == "noise":
                matrix.add_(1e-3 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1)))
            else:
                matrix[0, 0] = torch.nan
        found = await judge(engines)
        assert found.verdict.strays == {"b"} and found.donors.keys() == {"b"}
        donor = engines[PEERS.index(found.donors[PeerId("b")][0])]
        await odd.restore(bytes(await donor.snapshot()), version=odd.version)
        healed = await judge(engines)
        assert not healed.verdict.strays and torch.equal(weights(odd), weights(engines[2]))
        await chain.step(rng)
        assert not (await judge(engines)).verdict.strays


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_bit_changes_the_digest_and_nothing_else_does(device: str) -> None:
    x, y = torch.randn(5, 3), torch.randn(7)
    assert digest([x.to(device), y]) == digest([x, y])
    assert digest([x, y]) == digest([x.clone(), y]) == digest([x.t().contiguous().t(), y])
    flipped = x.clone()
    flipped.view(torch.int32)[2, 1] ^= 1
    assert digest([flipped, y]) != digest([x, y]) != digest([y, x])


async def test_weights_are_measured_beside_compute_and_no_update_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, read_on, wanted = (threading.Event() for _ in range(3))

    class Watched:
        """Tells when somebody has to wait for it."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            if self.lock.locked():
                wanted.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def slow(tensors: Iterable[torch.Tensor]) -> bytes:
        first = digest(tensors)
        reading.set()
        assert read_on.wait(60)
        assert digest(tensors) == first, "the weights changed while they were read"
        return first

    async with compute_thread() as compute:
        chain, rng = StageChain(tiny(1), compute), random.Random(0)
        ((engine,),) = chain.engines
        expected = digest(engine._state.newest)
        monkeypatch.setattr(snapshot, "digest", slow)
        monkeypatch.setattr(engine, "_weights_stay", Watched())
        measuring = asyncio.ensure_future(engine.measure())
        await asyncio.to_thread(reading.wait)
        loss, tokens = await chain.compute(rng, 0)  # microbatches are computed meanwhile
        step = asyncio.ensure_future(chain.finish(loss, tokens))
        assert await asyncio.to_thread(wanted.wait, 30) and not step.done(), "the update waits"
        read_on.set()
        assert await measuring == (0, expected)
        await step
        assert engine.version == 1
