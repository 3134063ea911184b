"""What a mesh costs: our tensor parallelism compared with torch's.

    python benchmarks/mesh.py [--ranks 2] [--compute bf16] [--turns N] [--json FILE]

One step of three microbatches in flight (forwards, backwards in another order, weight gradients) of a stage
with head and loss, split by `ShardedStage` and by torch's `parallelize_module`, on the same ranks of one group (gloo;
nccl where there is CUDA), with and without sequence parallelism. `small` is a stage in which calls cost more than
arithmetic, `large` one that keeps this machine's cores busy. The two take turns in the same processes, and a ratio is
the median over turns of ours / theirs; beside it the middle half of the turns. That both compute the same is checked
before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from harness import Benchmark, middle, write

from swarmnet.manifest.schema import Model

if TYPE_CHECKING:
    from mesh_tensor import Case  # what torch needs for it takes long to import: not for --help

PATIENCE_S = 300.0
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}
"""Of the largest element: how far the two ways may be apart."""

Figures = dict[str, Any]


def cases(asked: argparse.Namespace, *, cuda: bool) -> list[Case]:
    """What is timed."""
    from mesh_tensor import Case

    small = Model(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    )
    if asked.quick:
        return [Case("small", small, 1, 32, turns=2, repeats=1, compute=asked.compute)]
    large = Model(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64
    )
    batch, length = 2, 256
    if cuda:
        large = Model(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=2,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
        )
        batch, length = 1, 4096
    return [
        Case("small", small, 1, 32, 4 * asked.turns, 8, asked.compute),
        Case("large", large, batch, length, asked.turns, 1, asked.compute),
    ]


def tensor_part(asked: argparse.Namespace, *, cuda: bool) -> list[Figures]:
    """All cases, printed as they come. Ends the benchmark if the ranks fail or the two ways disagree."""
    print(
        f"{'stage':8} {'sequence parallel':18} {'ours':>10} {'torch':>10} {'ours / torch':>13}  middle half   "
        "difference   load"
    )
    rows = []
    todo = cases(asked, cuda=cuda)
    with ranks(asked.ranks, todo, cuda=cuda) as first:
        for case, sequence_parallel in itertools.product(todo, (False, True)):
            row = _next(first)
            if not row["difference"] <= TOLERANCE[asked.compute]:
                sys.exit(f"the two ways do not compute the same: {row['difference']:.1e}")
            ratio = middle([a / b for a, b in zip(row["ours"], row["theirs"], strict=True)])
            rows.append(
                row | {"stage": case.name, "sequence_parallel": sequence_parallel, "ranks": asked.ranks, "ratio": ratio}
            )
            ours, theirs = (1e3 * statistics.median(row[way]) for way in ("ours", "theirs"))
            low, high = ratio["quarters"]
            print(
                f"{case.name:8} {'yes' if sequence_parallel else 'no':18} {ours:7.1f} ms {theirs:7.1f} ms "
                f"{ratio['median']:13.2f}  {low:.2f} - {high:.2f}   {row['difference']:.1e}      "
                f"{os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return rows


@contextlib.contextmanager
def ranks(size: int, todo: Sequence[Case], *, cuda: bool) -> Iterator[Connection]:
    """`size` processes of one group, and the pipe of the first."""
    from mesh_tensor import run_rank

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ends = [context.Pipe() for _ in range(size)]
        jobs = [
            context.Process(
                target=run_rank, args=(there, todo, rank, size, f"{directory}/store"), kwargs={"cuda": cuda}
            )
            for rank, (_, there) in enumerate(ends)
        ]
        for job, (_, there) in zip(jobs, ends, strict=True):
            job.start()
            there.close()
        try:
            yield ends[0][0]
        finally:
            for (here, _), job in zip(ends, jobs, strict=True):
                here.close()
                job.join(10.0)
                job.kill()


def _next(pipe: Connection) -> Figures:
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not pipe.poll(0.1):
            if time.monotonic() > deadline:
                sys.exit("the ranks hang")
        found: Figures = pipe.recv()
        return found
    except EOFError:
        sys.exit("the ranks failed")


def main() -> None:
    """Measure, print, write JSON if asked."""
    parser = Benchmark(__doc__, quick="a tiny stage, two turns: that it runs, not how fast")
    parser.add_argument("--ranks", type=int, help="default: 2, with CUDA the number of GPUs")
    parser.add_argument("--compute", choices=list(TOLERANCE), help="default: fp32, with CUDA bf16")
    parser.add_argument("--turns", type=int, default=15)
    asked = parser.asked()
    cuda = torch.cuda.is_available()
    asked.compute = asked.compute or ("bf16" if cuda else "fp32")
    asked.ranks = asked.ranks or (torch.cuda.device_count() if cuda else 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = {"tensor": tensor_part(asked, cuda=cuda)}
    write(asked.json, figures)


if __name__ == "__main__":
    main()
