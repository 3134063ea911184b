"""What large stages cost on the host, a step: bytes and seconds of every copy, digest and code, before and after.

    python benchmarks/desk.py [--megabytes N] [--json FILE]

A desk check: nobody here has eight GPUs. What the host does is measured on one core of this machine, in the same run;
what a GPU's line does is a constant below. "before" is as it was when the first desk check was made: digests by SHA-256
on the compute thread every ten steps, states written and activations coded while ranks wait, all that ranks share
pinned by each of them, and arithmetic by torch's kernels, one for each operation, in place of the compiled ones. Prints
two Markdown tables.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages, as in a peer: before torch's first tensor

import torch
from blake3 import blake3

from swarmnet.averaging.exchange import PIECE_ELEMENTS
from swarmnet.manifest.schema import Optimizer
from swarmnet.net.grpc_options import tune_allocator
from swarmnet.stage.optimizer import StageOptimizer
from swarmnet.wire import codecs, kernel_build, kernels

PINNED, PAGEABLE = 25e9, 6e9
"""Bytes a second between a GPU and the host: PCIe 4.0 x16 has 31.5 GB/s each way, of which copies reach about 25; what
is not pinned goes through the driver's own buffers, at about 6."""

CORES = 64
"""Of a machine with eight GPUs, for what takes all cores."""

ACTIVATION = 1 << 24
"""Elements: 4096 tokens of width 4096."""

MEMBERS = 4
"""Replicas of a stage that average."""


@dataclass(frozen=True, slots=True)
class Case:
    """A stage, and who computes it. microbatches: of a step, at this replica."""

    name: str
    parameters: float
    ranks: int
    width: int
    microbatches: int = 32
    tokens: int = 4096


CASES = (Case("1B on one GPU", 1e9, 1, 2048), Case("7B on eight GPUs", 7e9, 8, 4096))


@dataclass(frozen=True, slots=True)
class Row:
    """num_bytes: a step's. before, after: seconds that compute waits for it, a step. beside: seconds after, of another
    thread, while compute goes on."""

    what: str
    num_bytes: float
    before: float
    after: float
    beside: float = 0.0


def measure(megabytes: int) -> dict[str, float]:
    """Bytes a second of one core, by what it does; of codecs, of fp32; of "update", seconds a parameter."""
    torch.set_num_threads(1)
    tune_allocator()
    size = megabytes * (1 << 20) // 4
    values, other = torch.randn(size), torch.empty(size)
    raw = values.view(torch.uint8).numpy().data
    activation = values[:ACTIVATION]
    integers = (values[:PIECE_ELEMENTS] * 40).to(torch.int64)
    packed, small = codecs.encode("int8", activation), codecs.encode("small", integers)
    optimizer = StageOptimizer([other], Optimizer(), offload=True)

    def rate(elements: int, job: Callable[[], object]) -> float:
        found = []
        for _ in range(6):
            began = time.perf_counter()
            job()
            found.append(time.perf_counter() - began)
        return 4 * elements / min(found[1:])

    return {
        "copy": rate(size, lambda: other.copy_(values)),
        "sha256": rate(size, lambda: hashlib.sha256(raw).digest()),
        "blake3": rate(size, lambda: blake3(raw).digest()),
        "int8, encode": rate(activation.numel(), lambda: codecs.encode("int8", activation)),
        "int8, decode": rate(activation.numel(), lambda: codecs.decode(packed)),
        "small, encode": rate(integers.numel(), lambda: codecs.encode("small", integers)),
        "small, add": rate(integers.numel(), lambda: codecs.decode_integers(integers, small, add=True)),
        "update": 4 / rate(size, lambda: optimizer.step([values], learning_rate=1e-9, parameters=[other])),
    }


def rows(case: Case, then: dict[str, float], core: dict[str, float]) -> Iterator[Row]:
    """All of a step. then, core: what was measured by the reference, and by compiled kernels."""
    p, ranks, meshed = case.parameters, case.ranks, case.ranks > 1
    weights, total, state = 4 * p, 8 * p, 12 * p
    there = 0.0 if meshed else weights / PAGEABLE  # the mesh's are in host memory already
    yield Row(
        "digest of the weights (every 10 steps; now 100)",
        weights / 100,
        (weights / then["sha256"] + there) / 10,
        0.0,
        weights / core["blake3"] / 100,
    )
    if meshed:
        yield Row("sum of the step, ranks to host", total, total / ranks / PINNED, total / ranks / PAGEABLE)
        yield Row("finished sum, host to ranks", total, total / ranks / PINNED, total / ranks / PAGEABLE)
    else:
        yield Row("sum of the step, to the host by pieces", total, 0.0, 0.0, total / PAGEABLE)
        yield Row("finished sum, host to device", total, *[total / PINNED] * 2)
    if meshed:
        yield Row("weights and moments to the host copy", state, state / ranks / PINNED, state / ranks / PAGEABLE)
    coded = (weights * (1 + 1 / MEMBERS) / by["small, encode"] + 2 * weights / by["small, add"] for by in (then, core))
    what = f'sums coded, of {MEMBERS} members (`small`); beside compute if `sync = "overlap"`'
    yield Row(what, weights * (3 + 1 / MEMBERS), *coded)
    activation = 4.0 * case.tokens * case.width
    crossing = 4 * case.microbatches * activation
    if meshed:
        before, beside = (crossing / 2 * (1 / by["int8, encode"] + 1 / by["int8, decode"]) for by in (then, core))
        yield Row("activations and gradients coded (`int8`)", crossing, before, 0.0, beside)
        copied = crossing / core["copy"]
        yield Row("activations and gradients to ranks and back", crossing, copied, copied)
    else:
        yield Row("coded activations and gradients, over the line", crossing / 4, *[crossing / 4 / PAGEABLE] * 2)
    before, after = p * then["update"] / ranks, p * core["update"] / CORES
    yield Row("update, if `offload_optimizer`; not in the sum", 0.0, before, after)


def table(case: Case, found: list[Row]) -> Iterator[str]:
    """The rows, and their sums."""
    counted = [row for row in found if "offload" not in row.what]
    fields = ("num_bytes", "before", "after", "beside")
    whole = Row("**all**", *(sum(getattr(row, name) for row in counted) for name in fields))
    yield f"| {case.name} | GB a step | compute waits, before: s | now: s | beside compute, now: s |"
    yield "|---|---|---|---|---|"
    for row in (*found, whole):
        yield f"| {row.what} | {row.num_bytes / 1e9:.1f} | {row.before:.2f} | {row.after:.2f} | {row.beside:.2f} |"
    yield ""
    total = 8 * case.parameters
    if case.ranks > 1:
        shared = 2 * total + 2 * 12 * case.parameters
        yield f"Pinned at each start: {shared / 1e9:.0f} GB by each of {case.ranks} ranks; now what a microbatch needs."
    else:
        rounded = 2.0 ** math.ceil(math.log2(total))
        yield f"Pinned for the finished sum: {rounded / 1e9:.1f} GB, the next power of two; now {total / 1e9:.1f} GB."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kernel_build.prepare(threads=1).join()
    found = {}
    for way in ("reference", "kernels"):
        with kernels.tried(kernels.used() if way == "kernels" else None):
            core = found[way] = measure(options.megabytes)
        rates = [f"{name} {value / 1e9:.2f} GB/s" for name, value in core.items() if name != "update"]
        print(f"one core here, {way}:", "; ".join(rates) + f"; update {1e9 * core['update']:.1f} ns a parameter")
    for case in CASES:
        print("", *table(case, list(rows(case, found["reference"], found["kernels"]))), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
