"""What a mesh costs: our tensor parallelism beside torch's, orders to ranks, and a restart, each beside a neighbour.

    python benchmarks/mesh.py [--part tensor,orders,engine] [--ranks 2] [--compute bf16] [--turns N] [--json FILE]

`tensor`: one step of three microbatches in flight (forwards, backwards in another order, weight gradients) of a stage
with head and loss, split by `ShardedStage` and by torch's `parallelize_module`, on the same ranks of one group (gloo;
nccl where there is CUDA), with and without sequence parallelism. `small` is a stage in which calls cost more than
arithmetic, `large` one that keeps this machine's cores busy. The two take turns in the same processes, and a ratio is
the median over turns of ours / theirs; beside it the middle half of the turns. That both compute the same is checked
before anything is timed.

`orders`: a round trip to all ranks, from `RankGroup.order` until all have answered, beside an order by broadcast with
the answers gathered (torch, same ranks), and beside bare pipes of `multiprocessing`. Then one rank is killed: how soon
the peer process knows, and how soon all ranks take orders again, beside a cold `python -c "import torch"`.

`engine`: a microbatch (forward, backward and weight pass, from payload to payload) through an engine on the ranks, each
with one thread, beside the same stage's engine in one process with one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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


def median_of(ratios: Sequence[float]) -> Figures:
    """The median, and the quarters."""
    if len(ratios) < 2:
        return {"median": ratios[0], "quarters": [ratios[0], ratios[0]]}
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": middle, "quarters": [low, high]}


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
            ratio = median_of([a / b for a, b in zip(row["ours"], row["theirs"], strict=True)])
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


def orders_part(asked: argparse.Namespace, *, cuda: bool) -> Figures:
    """Round trips and restarts, printed."""
    from mesh_orders import orders, restarts

    devices = [f"cuda:{rank}" if cuda else "cpu" for rank in range(asked.ranks)]
    turns, times, kills = (2, 20, 1) if asked.quick else (asked.turns, 500, 7)
    trips = orders(devices, turns=turns, times=times)
    beside = {
        way: median_of([a / b for a, b in zip(trips["order"], trips[way], strict=True)])
        for way in ("broadcast", "pipe")
    }
    print(
        f"\nan order to {len(devices)} ranks and back: {1e6 * statistics.median(trips['order']):.0f} us; "
        + "; ".join(
            f"{ratio['median']:.2f} ({ratio['quarters'][0]:.2f} - {ratio['quarters'][1]:.2f}) of "
            f"{'a broadcast and a gather' if way == 'broadcast' else 'bare pipes'} "
            f"({1e6 * statistics.median(trips[way]):.0f} us)"
            for way, ratio in beside.items()
        ),
        flush=True,
    )
    found = restarts(devices, times=kills)
    ratio = median_of([a / b for a, b in zip(found["back"], found["import torch"], strict=True)])
    print(
        f"a killed rank is noticed after {1e3 * statistics.median(found['noticed']):.0f} ms, all are back "
        f"{statistics.median(found['back']):.2f} s later: {ratio['median']:.2f} ({ratio['quarters'][0]:.2f} - "
        f"{ratio['quarters'][1]:.2f}) of a cold import of torch ({statistics.median(found['import torch']):.2f} s)"
    )
    return {"trips": trips, "vs": beside, "restarts": found, "back_vs_import": ratio, "ranks": len(devices)}


def engine_part(asked: argparse.Namespace, *, cuda: bool) -> list[Figures]:
    """Both engines, printed."""
    from mesh_engine import microbatches

    if asked.ranks == 1:
        print("\nengine: one rank is no mesh, it is the engine in process")
        return []
    devices = [f"cuda:{rank}" if cuda else "cpu" for rank in range(asked.ranks)]
    print(f"\n{'engine':8} {f'{asked.ranks} ranks':>18} {'in process':>12} {'ratio':>8}  middle half  difference  load")
    rows = []
    for case in cases(asked, cuda=cuda):
        row: Figures = microbatches(case, devices)
        if not row["difference"] <= TOLERANCE[asked.compute]:
            sys.exit(f"the two engines do not compute the same: {row['difference']:.1e}")
        ratio = median_of([a / b for a, b in zip(row["mesh"], row["in process"], strict=True)])
        rows.append(row | {"stage": case.name, "ranks": asked.ranks, "ratio": ratio})
        mesh, own = (1e3 * statistics.median(row[way]) for way in ("mesh", "in process"))
        low, high = ratio["quarters"]
        print(
            f"{case.name:8} {mesh:15.1f} ms {own:9.1f} ms {ratio['median']:8.2f}  {low:.2f} - {high:.2f}   "
            f"{row['difference']:.1e}     {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return rows


PARTS: dict[str, Callable[..., Any]] = {"tensor": tensor_part, "orders": orders_part, "engine": engine_part}


def main() -> None:
    """Measure, print, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS), help="which of them, with commas  [all]")
    parser.add_argument("--ranks", type=int, help="default: 2, with CUDA the number of GPUs")
    parser.add_argument("--compute", choices=list(TOLERANCE), help="default: fp32, with CUDA bf16")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tiny stage, two turns: that it runs, not how fast")
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    asked.compute = asked.compute or ("bf16" if cuda else "fp32")
    asked.ranks = asked.ranks or (torch.cuda.device_count() if cuda else 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    if unknown := set(asked.part.split(",")) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    figures = {part: PARTS[part](asked, cuda=cuda) for part in asked.part.split(",")}
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
