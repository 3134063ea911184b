"""What it costs to answer for one's work: digests of each microbatch, old weights in host memory, and an audit.

    python benchmarks/works.py [--hidden N] [--layers N] [--tokens N] [--device cuda] [--json FILE]

The middle stage of three, `--layers` layers in each, one microbatch of `--tokens` tokens, activations in bf16. Seconds
are the best of five turns on one thread: `compute_s` of a microbatch forward, backward and weights; `hash_s` of what
goes in and out of it, which a peer does as they travel; `sign_s` of two signatures of what it sends and two checks of
what it was sent; `root_s` of the tree over 512 works; `apply_s` of an update,
`keep_s` of copying the weights out before it; `recompute_s` of the microbatch for an auditor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace


def seconds(turns: int, job: Callable[[], object]) -> float:
    """The best of some turns."""
    found = []
    for _ in range(turns):
        begun = time.perf_counter()
        job()
        found.append(time.perf_counter() - begun)
    return min(found)


async def measure(hidden: int, layers: int, tokens: int, device: str) -> dict[str, float]:
    """The figures, by name."""
    import torch

    from swarmnet.engine.compute_thread import ComputeThread
    from swarmnet.ids import Ballot, Chain, PeerId, RoundId
    from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Training, Wire
    from swarmnet.messages import Commit, Stamp, WorkRecord
    from swarmnet.net.identity import Identity
    from swarmnet.peer.engines import torch_engine
    from swarmnet.pipeline.transfers import Transfers
    from swarmnet.pipeline.works import digest
    from swarmnet.pledge import leaf, root_of
    from swarmnet.ranks.device_backend import DeviceBackend
    from swarmnet.statement import statement
    from swarmnet.wire import codecs, kernel_build

    kernel_build.prepare(threads=1).join()
    manifest = Manifest(
        model=Model(
            vocab_size=1024, hidden_size=hidden, intermediate_size=3 * hidden, num_layers=3 * layers,
            num_heads=hidden // 64, num_kv_heads=hidden // 64, head_dim=64,
        ),
        cut=Cut(stages=3, layers=(layers, layers, layers)),
        training=Training(total_steps=9, microbatches=1, microbatch_size=1, sequence_length=tokens),
        numerics=Numerics(mode="deterministic"),
        averaging=Averaging(codec="small"),
        wire=Wire(activations="bf16", gradients="bf16"),
    )  # fmt: skip
    threads = ComputeThread()
    try:
        backend = DeviceBackend(manifest.of_stage(1), device=device)
        engine = torch_engine(manifest, 1, threads, backend)
        backend.past.keep(3)
        words = codecs.encode("int32", torch.randint(0, 1024, (1, tokens + 1), dtype=torch.int32))
        crossing = [codecs.encode("bf16", torch.randn(1, tokens, hidden)) for _ in range(2)]
        inputs, gradient = (words, crossing[0]), (crossing[1],)
        computed, applied, again = [], [], []
        for step in range(5):
            stash = await engine.forward(step, 0, inputs, train=True)
            answer = await engine.backward(stash, gradient)
            assert await engine.accumulate(stash)
            computed.append(stash.compute_s)
            await engine.sums.open_sum()
            await engine.sums.put(0, await engine.sums.contribution(0, engine.sums.num_elements))
            digest, square = await engine.sums.seal()
            at = RoundId(Ballot(0, PeerId("peer")), 0)
            commits = [Commit(stage, step, Chain(""), at, digest, tokens, 1.0, square) for stage in range(3)]
            begun = time.perf_counter()
            await engine.apply(commits)
            applied.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            await engine.recompute(step, [(0, inputs, gradient)])
            again.append(time.perf_counter() - begun)
        payloads = inputs, stash.output, gradient, answer
        record = WorkRecord(0, *map(digest, payloads), 0.0, 0)
        me = Identity.from_seed(bytes(32))
        beside = SimpleNamespace(
            stamp=lambda step: Stamp(step, 1, Chain("ab" * 32)),
            past=lambda stage, step: None,
            known=lambda stage, peer: True,
        )
        sender = Transfers(me.peer, me, beside, 4).open(0)

        def sign() -> None:
            for kind, found in (("output", record.output), ("answer", record.answer)):
                sent = sender.signed(0, kind, found, record.input, record.gradient)
                assert me.verify(me.peer, statement(sent), sent.signature)

        return {
            "parameters": float(backend.state.canonical.num_elements),
            "compute_s": min(computed),
            "hash_s": seconds(5, lambda: [digest(payload) for payload in payloads]),
            "sign_s": seconds(20, sign),
            "root_s": seconds(5, lambda: root_of({index: leaf(record) for index in range(512)})),
            "apply_s": min(applied),
            "keep_s": seconds(5, lambda: backend.past.note(engine.version)),
            "recompute_s": min(again),
            "host_bytes": float(sum(memory.nbytes for memory in backend.past._memory)),
        }
    finally:
        threads.close()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="width of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of each stage")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of a microbatch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    typed = parser.parse_args()
    found = asyncio.run(measure(typed.hidden, typed.layers, typed.tokens, typed.device))
    compute, apply = found["compute_s"], found["apply_s"]
    print(f"a microbatch {compute:.4f} s of compute; its digests {found['hash_s'] / compute:.3%} of that")
    print(f"two signatures of what it sends and two checks {found['sign_s']:.6f} s: {found['sign_s'] / compute:.3%}")
    print(
        f"an audit of it {found['recompute_s'] / compute:.2f} microbatches; a tree of 512 works {found['root_s']:.4f} s"
    )
    print(f"an update {apply:.4f} s, {found['keep_s'] / apply:.1%} of it to keep weights")
    each = found["host_bytes"] / found["parameters"]
    print(f"host memory {found['host_bytes'] / 2**20:.0f} MiB: {each:.0f} bytes a weight")
    if typed.json:
        typed.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
