"""All codecs beside each other, a plain cast, and bitsandbytes' own 8 and 4 bits, in one run on this machine.

    python benchmarks/codecs.py [--elements N] [--threads N] [--repeat N] [--device cuda] [--json FILE]

Every codec is timed in turn, round after round, and its fastest round counts, so that a disturbance of the machine
meets all of them. Rates are GB/s of fp32 input. With `--device cuda` tensors lie on the GPU; ours are encoded there,
and what is sent, decoded and added is in host memory, as in a peer. Errors are relative L2 errors on four kinds of
tensors; of nf4 (error feedback) and sparse:F they say what is sent later, not what is lost. In the
JSON, `vs_bitsandbytes` holds ratios of ours to bitsandbytes' (speed: above 1 is faster; error: below 1 is closer) for
int8 and bnb8 against its 8 bits, nf4 against its 4.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Benchmark, write

from swarmnet.wire import codecs

Operation = Callable[[], object]

OURS = ("fp32", "bf16", "fp16", "int8", "bnb8", "nf4", "sparse:0.05")
ERRORS = ("gaussian", "heavy_tails", "loud_channels", "decades")
COLUMNS = ("encode", "decode", "size", *(f"error {kind}" for kind in ERRORS))


def distributions(num_elements: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Gaussian; heavy tails (Student's t, 2 degrees); a few loud channels; magnitudes over six decades."""
    seeded = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seeded)

    tails = normal(num_elements) / torch.sqrt((normal(num_elements) ** 2 + normal(num_elements) ** 2) / 2)
    loud = normal(num_elements // 1024, 1024)
    loud[:, ::171] *= 60
    decades = normal(num_elements) * 10 ** (6 * torch.rand(num_elements, generator=seeded) - 6)
    kinds = {"gaussian": normal(num_elements), "heavy_tails": tails, "loud_channels": loud.view(-1), "decades": decades}
    return {name: kind.to(device) for name, kind in kinds.items()}


def best_seconds(operations: dict[str, Operation], repeat: int, device: torch.device) -> dict[str, float]:
    """The fastest of `repeat` rounds of each operation, taken in turn."""
    best = dict.fromkeys(operations, math.inf)
    for _ in range(repeat + 1):  # the first round warms up and can only lose
        for name, operation in operations.items():
            start = time.perf_counter()
            operation()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())


Theirs = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor], float]
"""encode, decode, bytes an element"""


def theirs() -> dict[str, Theirs]:
    """bitsandbytes as it is."""
    from bitsandbytes import functional as bnb

    return {
        "bnb 8 bit": (
            lambda x: bnb.quantize_blockwise(x, blocksize=256),
            lambda coded: bnb.dequantize_blockwise(*coded),
            1 + 4 / 256,
        ),
        "bnb 4 bit": (
            lambda x: bnb.quantize_4bit(x, blocksize=64, quant_type="nf4"),
            lambda coded: bnb.dequantize_4bit(*coded),
            1 / 2 + 4 / 64,
        ),
    }


def measure(num_elements: int, repeat: int, device: torch.device) -> dict[str, dict[str, float]]:
    kinds = distributions(num_elements, device)
    x = kinds["gaussian"]
    others = theirs()
    operations: dict[str, Operation] = {"cast bf16 encode": x.bfloat16, "cast bf16 decode": x.bfloat16().float}
    for name in OURS:
        held = codecs.encode(name, x)
        operations[f"{name} encode"] = partial(codecs.encode, name, x)
        operations[f"{name} decode"] = partial(codecs.decode, held)
    for name, (encode, decode, _) in others.items():
        operations[f"{name} encode"] = partial(encode, x)
        operations[f"{name} decode"] = partial(decode, encode(x))
    seconds = best_seconds(operations, repeat, device)
    rates: dict[str, dict[str, float]] = {}
    for operation, taken in seconds.items():
        what = max((what for what in COLUMNS if operation.endswith(f" {what}")), key=len)
        rates.setdefault(operation.removesuffix(f" {what}"), {})[what] = 4 * num_elements / taken / 1e9
    rates["cast bf16"]["size"] = 0.5
    for name in OURS:
        rates[name]["size"] = codecs.encode(name, x).num_bytes / (4 * num_elements)
    for name, (_, _, width) in others.items():
        rates[name]["size"] = width / 4
    for kind, tensor in kinds.items():
        rates["cast bf16"][f"error {kind}"] = relative_error(tensor, tensor.bfloat16().float())
        for name in OURS:
            decoded = codecs.decode(codecs.encode(name, tensor)).to(device)
            rates[name][f"error {kind}"] = relative_error(tensor, decoded)
        for name, (encode, decode, _) in theirs().items():
            decoded = decode(encode(tensor))
            rates[name][f"error {kind}"] = relative_error(tensor[: decoded.numel()], decoded)
    return rates


def versus(rates: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Ours over bitsandbytes', column by column."""
    pairs = (("int8", "bnb 8 bit"), ("bnb8", "bnb 8 bit"), ("nf4", "bnb 4 bit"))
    return {ours: {what: rates[ours][what] / rate for what, rate in rates[other].items()} for ours, other in pairs}


def table(rows: dict[str, dict[str, float]]) -> None:
    """Print it, a codec a line."""
    columns = [column for column in COLUMNS if any(column in row for row in rows.values())]
    print(" " * 12 + "".join(f"{column.removeprefix('error '):>18}" for column in columns))
    for name, row in rows.items():
        print(f"{name:12}" + "".join(f"{format(row[c], '.3g') if c in row else '-':>18}" for c in columns))


def main() -> None:
    parser = Benchmark(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.asked()
    if importlib.util.find_spec("bitsandbytes") is None:
        sys.exit("codecs.py compares with bitsandbytes: pip install 'swarmnet-train[lora]'")
    torch.set_num_threads(arguments.threads)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # as a peer does: large buffers stay mapped between uses
            mallopt(-3, 32 << 20)
            mallopt(-1, 1 << 30)
    rates = measure(arguments.elements, arguments.repeat, torch.device(arguments.device))
    ratios = versus(rates)
    print("ours over bitsandbytes': speed above 1 is faster, error below 1 is closer")
    table(ratios)
    print(f"\n{arguments.elements} elements, {arguments.threads} thread(s): GB/s of fp32, share of its size, errors")
    table(rates)
    write(arguments.json, {"threads": arguments.threads, "codecs": rates, "vs_bitsandbytes": ratios})


if __name__ == "__main__":
    main()
