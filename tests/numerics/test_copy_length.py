"""How long a copy of a stage may be: as long as every honest one is, in each kind of run, and not a byte longer."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace

import pytest
from restorers import restorer
from stage_chain import StageChain, compute_thread, tiny

from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import NoReplica, UsageError
from swarmnet.ids import NO_RESTART, Chain, PeerId, RunId
from swarmnet.manifest.schema import Averaging, Manifest
from swarmnet.messages import Answer, Packed, Request, SnapshotRequest, StateHeader, TrailRequest, TrailStep
from swarmnet.peer import collect_remote
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.state import snapshot_fetch
from swarmnet.state.snapshot_source import SnapshotSource
from swarmnet.step.gate import Shape

RUN, CHAIN, MATE = RunId("7" * 64), Chain("00" * 32), PeerId("mate")
STAGE, STEPS = 1, 3
SYNCS = {
    "exact": tiny(3, averaging=Averaging(codec="int64")),
    "overlap": tiny(3, averaging=Averaging(sync="overlap", codec="small")),
    "local": tiny(3, mode="fp32", averaging=Averaging(sync="local", codec="fp32")),
}


class Mate:
    """A replica that hands over what it has, and `longer` bytes: engine and step machine of a source, and the line."""

    def __init__(self, engine: TorchEngine, *, longer: int = 0) -> None:
        self._engine, self._longer = engine, longer
        self._source = SnapshotSource(STAGE, self, self._where, leads_on=lambda header: True)  # type: ignore[arg-type]

    def _where(self) -> StateHeader:
        return StateHeader(self._engine.version, CHAIN, CHAIN, CHAIN)

    async def snapshot(self) -> bytes:
        return bytes(await self._engine.snapshot()) + bytes(self._longer)

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        if isinstance(request, TrailRequest):
            yield TrailStep(None, ())
            return
        assert isinstance(request, SnapshotRequest)
        async for answer in self._source.serve(request):
            yield answer


async def restored(joiner: TorchEngine, mate: Mate) -> None:
    """As a replica does it. Raises NoReplica, with what the mate is refused for."""
    said: list[dict[str, object]] = []
    machine = restorer(
        STAGE,
        Shape(3, 4, 20),
        transport=mate,
        compute=joiner,
        exchange=SimpleNamespace(collected_bytes=0),  # nothing was summed since
        member=SimpleNamespace(
            restart=NO_RESTART, shape=Shape(3, 4, 20), view=SimpleNamespace(mates=lambda: ()), stand=lambda header: None
        ),
        event=lambda event, fields: said.append(fields) if event == "join_failed" else None,
    )
    try:
        await machine.join(lambda: [MATE])
    except NoReplica as error:
        raise NoReplica(str(said)) from error


async def gathered(chain: StageChain, mate: Mate) -> memoryview:
    """As whoever takes no part does it."""
    found = SimpleNamespace(manifest=chain.manifest, run=RUN)
    _, data = await collect_remote._fetch(
        found,
        mate,
        STAGE,
        [MATE],
        chain.step_number,  # type: ignore[arg-type]
    )
    return data


@pytest.mark.parametrize("manifest", SYNCS.values(), ids=SYNCS)
async def test_a_mate_is_believed_to_the_byte(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_fetch, "_PATIENCE_S", 0.0)  # a mate that is refused is the only one: no use in waiting
    async with compute_thread() as compute:
        chain = StageChain(manifest, compute)
        for step in range(STEPS):
            await chain.step(random.Random(step))
        donor = chain.engines[STAGE][0]
        joiner = torch_engine(chain.manifest, STAGE, compute, DeviceBackend(chain.manifest.of_stage(STAGE)))
        await restored(joiner, Mate(donor))
        assert await joiner.snapshot() == await donor.snapshot() == await gathered(chain, Mate(donor))
        with pytest.raises(NoReplica, match="more bytes than this can have"):
            await restored(joiner, Mate(donor, longer=1))
        with pytest.raises(UsageError, match="more bytes than this can have"):
            await gathered(chain, Mate(donor, longer=1))


@pytest.mark.parametrize("manifest", SYNCS.values(), ids=SYNCS)
async def test_every_stage_knows_how_long_those_of_its_neighbours_are(manifest: Manifest) -> None:
    async with compute_thread() as compute:
        cut = manifest.cut.model_copy(update={"layers": (1, 2, 1)})
        chain = StageChain(manifest.model_copy(update={"cut": cut}), compute)
        await chain.step(random.Random(1))
        copies: Sequence[memoryview] = [await replicas[0].snapshot() for replicas in chain.engines]
        for (engine,) in chain.engines:
            assert [engine.snapshot_bytes(stage) for stage in (0, 1, 2)] == [*map(len, copies)]
