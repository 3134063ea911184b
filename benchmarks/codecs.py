"""Wire codecs beside each other and beside bitsandbytes' blockwise 8 bit, in one run on this machine.

    python benchmarks/codecs.py [--elements N] [--threads N] [--repeat N] [--json FILE]

Every codec is timed in turn, round after round, and its fastest round counts, so that a disturbance of the machine
meets all of them. Rates are GB/s of fp32 input. Errors are relative L2 errors on four kinds of tensors. In the JSON,
`vs_bitsandbytes` holds ratios of int8 to bitsandbytes (speed: above 1 is faster; error: below 1 is closer).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from swarmnet.messages import Packed
from swarmnet.wire import codecs

Operation = Callable[[], object]


def distributions(num_elements: int) -> dict[str, torch.Tensor]:
    """Gaussian; heavy tails (Student's t, 2 degrees); a few loud channels; magnitudes over six decades."""
    seeded = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seeded)

    tails = normal(num_elements) / torch.sqrt((normal(num_elements) ** 2 + normal(num_elements) ** 2) / 2)
    loud = normal(num_elements // 1024, 1024)
    loud[:, ::171] *= 60
    decades = normal(num_elements) * 10 ** (6 * torch.rand(num_elements, generator=seeded) - 6)
    return {"gaussian": normal(num_elements), "heavy_tails": tails, "loud_channels": loud.view(-1), "decades": decades}


def best_seconds(operations: dict[str, Operation], repeat: int) -> dict[str, float]:
    """The fastest of `repeat` rounds of each operation, taken in turn."""
    best = dict.fromkeys(operations, math.inf)
    for _ in range(repeat + 1):                        # the first round warms up and can only lose
        for name, operation in operations.items():
            start = time.perf_counter()
            operation()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())


def decode_then_add(total: torch.Tensor, packed: Packed) -> None:
    total.add_(codecs.decode(packed))


def measure(num_elements: int, repeat: int) -> dict[str, dict[str, float]]:
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    x = distributions(num_elements)["gaussian"]
    packed = {name: codecs.encode(name, x) for name in codecs.FLOATS}
    theirs, state = quantize_blockwise(x, blocksize=codecs.INT8_BLOCK)
    total = torch.zeros_like(x)
    operations: dict[str, Operation] = {}
    for name, held in packed.items():
        operations[f"{name} encode"] = partial(codecs.encode, name, x)
        operations[f"{name} decode"] = partial(codecs.decode, held)
        operations[f"{name} add"] = partial(codecs.add_decoded, total, held)
        operations[f"{name} decode, then add"] = partial(decode_then_add, total, held)
    operations["bitsandbytes encode"] = lambda: quantize_blockwise(x, blocksize=codecs.INT8_BLOCK)
    operations["bitsandbytes decode"] = lambda: dequantize_blockwise(theirs, state)
    operations["bitsandbytes decode, then add"] = lambda: total.add_(dequantize_blockwise(theirs, state))
    seconds = best_seconds(operations, repeat)
    rates: dict[str, dict[str, float]] = {}
    for operation, taken in seconds.items():
        codec, _, what = operation.partition(" ")
        rates.setdefault(codec, {})[what] = 4 * num_elements / taken / 1e9
    for name, held in packed.items():
        rates[name]["size"] = held.num_bytes / (4 * num_elements)
    rates["bitsandbytes"]["size"] = (theirs.numel() + 4 * state.absmax.numel()) / (4 * num_elements)
    for kind, tensor in distributions(min(num_elements, 1 << 21)).items():
        for name in codecs.FLOATS:
            rates[name][f"error {kind}"] = relative_error(tensor, codecs.decode(codecs.encode(name, tensor)))
        theirs, state = quantize_blockwise(tensor, blocksize=codecs.INT8_BLOCK)
        rates["bitsandbytes"][f"error {kind}"] = relative_error(tensor, dequantize_blockwise(theirs, state))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:                        # as a peer does: large buffers stay mapped between uses
            mallopt(-3, 32 << 20)
            mallopt(-1, 1 << 30)
    rates = measure(arguments.elements, arguments.repeat)
    ours, theirs = rates["int8"], rates["bitsandbytes"]
    ratios = {what: ours[what] / theirs[what] for what in theirs}
    ratios["add"] = ours["add"] / theirs["decode, then add"]
    columns = list(ours)
    print(f"{arguments.elements} elements, {arguments.threads} thread(s); GB/s of fp32, sizes of fp32, relative errors")
    print(" " * 24 + "".join(f"{name:>14}" for name in (*rates, "int8 / bnb")))
    for column in columns:
        values = [row.get(column) for row in (*rates.values(), ratios)]
        print(f"{column:24}" + "".join(f"{'-' if v is None else format(v, '.4g'):>14}" for v in values))
    if arguments.json is not None:
        report = {"threads": arguments.threads, "codecs": rates, "vs_bitsandbytes": ratios}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
