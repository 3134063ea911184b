"""A real peer over real gRPC refuses what it must, each with its own code, and goes on serving."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import torch

from swarmnet.audit.auditor import AuditLog
from swarmnet.config.peer import PeerConfig
from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.data.windows import WindowTree
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.errors import RejectCode
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.file import run_id
from swarmnet.manifest.schema import Cut, Data, Manifest, Model, Training
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import Answer, Fetch, Gradient, Packed, Part, Process, Rejected, Request, SnapshotRequest, Stamp
from swarmnet.net.endpoint import Endpoint, open_endpoint
from swarmnet.net.identity import Identity
from swarmnet.peer.engines import torch_engine
from swarmnet.peer.peer import Peer
from swarmnet.peer.replica import ReplicaLimits
from swarmnet.pipeline.windows import OwnTokens, ProvenWindows
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Engine
from swarmnet.state.disk import CheckpointStore, DirectoryDisk
from swarmnet.testing.doubles import FakeService
from swarmnet.wire.codecs import encode

B, T, D, V = 2, 8, 16, 64

TRAINING = Training(total_steps=2, microbatches=1, microbatch_size=B, sequence_length=T, eval_every=0)
TEXT = Tokens(np.arange(1000, dtype=np.uint16) % V, V, "here.txt", "e" * 64)
ROOT = WindowTree(TEXT, T, Sampler(0, 1000, T, B).num_windows).root

MANIFEST = Manifest(
    model=Model(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
    ),
    cut=Cut(stages=2),
    data=Data(num_tokens=1000, tokens_sha256=TEXT.sha256, tokens_root=ROOT, tokenizer_sha256="e" * 64),
    training=TRAINING,
)
TOKENS, PROOF = OwnTokens(TEXT, MANIFEST.data, MANIFEST.training).training(0)


def tokens(fill: int = 1, shape: tuple[int, ...] = (B, T + 1)) -> Packed:
    return encode("int32", torch.full(shape, fill, dtype=torch.int32))


def hidden(fill: float = 0.5, shape: tuple[int, ...] = (B, T, D)) -> Packed:
    packed = encode("fp32", torch.zeros(shape))
    return Packed(packed.codec, packed.shape, torch.full(shape, fill).numpy().tobytes())


@contextlib.asynccontextmanager
async def peer_and_caller(tmp_path: Path):
    """(ask, peer): a peer that serves both stages, and a stranger's way to call it."""
    compute = ComputeThread()
    engines = {
        stage: torch_engine(MANIFEST, stage, compute, DeviceBackend(MANIFEST.of_stage(stage))) for stage in (0, 1)
    }
    run = run_id(MANIFEST)
    applied = asyncio.Event()

    def on_event(event: str, fields: dict[str, object]) -> None:
        if event == "applied" and fields["stage"] == 1:
            applied.set()

    config = PeerConfig(dir=tmp_path / "peer", host="127.0.0.1")
    async with open_endpoint(RunTerms.of(MANIFEST), config.network, numerics="cpu") as end:
        peer = Peer(
            end,
            end.transport,
            MANIFEST,
            {stage: Engine(engine, engine.sums) for stage, engine in engines.items()},
            tokens=lambda step, index: None,
            windows=ProvenWindows.of(MANIFEST.data, MANIFEST.training),
            disk=DirectoryDisk(CheckpointStore(tmp_path / "peer", run)),
            on_event=on_event,
            limits=ReplicaLimits(slots=4, output_cache_bytes=1 << 20),
            audit_log=AuditLog(),
        )
        async with end.serve(peer), asyncio.TaskGroup() as group:
            serving = group.create_task(peer.run())
            calls = PeerConfig(dir=tmp_path / "caller", host="127.0.0.1", bootstrap=end.directory.maddrs)
            calling = open_endpoint(RunTerms.of(MANIFEST), calls.network, numerics="caller")
            async with calling as stranger, stranger.serve(FakeService()):
                await found(stranger, end.me)

                async def ask(request: Request, *payload: Packed) -> Answer:
                    loop = asyncio.get_running_loop()
                    last = None
                    async with contextlib.aclosing(
                        stranger.transport.call(end.me, request, payload, deadline=loop.time() + 20)
                    ) as answers:
                        async for answer in answers:
                            last = answer
                    assert last is not None
                    return last

                yield ask, applied
            serving.cancel()
    compute.close()


async def found(endpoint: Endpoint, peer: PeerId) -> None:
    async with asyncio.timeout(20):
        while not any(record.peer == peer for record in await endpoint.directory.records()):
            pass  # every look is a round of the network


async def test_each_bad_call_is_refused_with_its_own_code(tmp_path: Path) -> None:
    async with peer_and_caller(tmp_path) as (ask, applied):

        async def code(request: Request, *payload: Packed) -> RejectCode:
            answer = await ask(request, *payload)
            assert isinstance(answer, Rejected), answer
            return answer.code

        for last in (Process(0, 1, 0), Process(0, 1, 0, purpose="eval")):
            assert await code(last, TOKENS, hidden(), PROOF) is RejectCode.NOT_A_FEEDER
        assert await code(Process(0, 0, 0), TOKENS, hidden(), PROOF) is RejectCode.BAD_SHAPE
        assert await code(Process(0, 0, 0), tokens(shape=(B, T)), PROOF) is RejectCode.BAD_SHAPE
        assert await code(Process(0, 0, 0), TOKENS) is RejectCode.BAD_SHAPE
        assert await code(Process(0, 0, 0), tokens(V), PROOF) is RejectCode.MALFORMED
        assert await code(Process(0, 0, 0), tokens(), PROOF) is RejectCode.MALFORMED
        assert await code(Process(0, 0, 1), TOKENS, PROOF) is RejectCode.MALFORMED
        assert await code(Process(2, 0, 0), tokens()) is RejectCode.FINISHED
        assert await code(Process(0, 7, 0), tokens()) is RejectCode.NOT_SERVED
        assert await code(SnapshotRequest(7)) is RejectCode.NOT_SERVED
        assert await code(Fetch(0, 0, 0, "input", cached=True)) is RejectCode.NOT_FOUND
        assert await code(Fetch(0, 0, 9, "input", cached=True)) is RejectCode.MALFORMED
        for start, stop in ((0, 1 << 40), (5, 4)):  # outside the gradient
            round_id = RoundId(Ballot(0, Identity.generate().peer), 0)
            refused = await code(Part(Stamp(0, 1, Chain("0" * 64)), round_id, "sum", start, stop))
            assert refused in (RejectCode.BAD_SHAPE, RejectCode.MALFORMED, RejectCode.NOT_FOUND)

        # Unharmed: the same peer takes a good microbatch through both stages and applies the step ...
        answer = await ask(Process(0, 0, 0), TOKENS, PROOF)
        assert isinstance(answer, Gradient) and answer.num_tokens == B * T
        async with asyncio.timeout(20):
            await applied.wait()
        # ... after which the step is stale.
        assert await code(Process(0, 0, 0), TOKENS, PROOF) is RejectCode.STALE
        evaluated = await ask(Process(1, 0, 0, purpose="eval"), tokens())
        assert isinstance(evaluated, Gradient) and evaluated.payload == ()
