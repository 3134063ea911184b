"""What summing and an update cost: nanoseconds a parameter on one core, beside torch's fused AdamW.

    python benchmarks/apply.py [--parameters N] [--turns N] [--device cuda] [--json FILE]

Ours is made of operations that every device rounds alike (docs/numerics.md): on the CPU by the kernels of
swarmnet/wire/kernels.cpp, and, in the second column, by those of torch, one for each operation, of the same bits.
torch's own AdamW does all in one kernel, with fused multiply-adds. Rows: torch's; bitsandbytes' AdamW8bit, if it is
installed; ours; with `lead`; with moments in 8 bits; what goes before an update, the average of a sum and its norm; and
what a microbatch costs: the check of its gradient, and adding it to a sum in fp32 (torch's own), int64, and on the
small grid. Processor time of the best of N turns; on a GPU the clock's.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import torch
from harness import Benchmark, write

from swarmnet.manifest.schema import Optimizer
from swarmnet.stage.accumulator import largest_magnitude
from swarmnet.stage.optimizer import StageOptimizer, average, square_norm
from swarmnet.stage.rounding import FineRounding, NoRounding, Rectangle, Rounding, SmallRounding
from swarmnet.wire import kernel_build, kernels


def measure(parameters: int, turns: int, device: torch.device) -> dict[str, float]:
    """Nanoseconds a parameter, by row."""
    generator = torch.Generator().manual_seed(0)
    shape = (parameters // 1024, 1024)
    weight, gradient = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    total = torch.randint(-(2**40), 2**40, (gradient.numel(),), generator=generator).to(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def timed(job: Callable[[], object]) -> float:
        found = []
        for _ in range(turns + 1):
            begun = clock()
            job()
            if device.type != "cpu":
                torch.cuda.synchronize(device)
            found.append(clock() - begun)
        return min(found[1:]) / gradient.numel() * 1e9

    def ours(**changed: object) -> float:
        optimizer = StageOptimizer([weight], Optimizer(**changed))
        return timed(lambda: optimizer.step([gradient], learning_rate=1e-4))

    def fused() -> float:
        leaf = torch.nn.Parameter(weight)
        leaf.grad, optimizer = gradient, torch.optim.AdamW([leaf], lr=1e-4, fused=True)
        return timed(optimizer.step)

    def bitsandbytes() -> dict[str, float]:
        if importlib.util.find_spec("bitsandbytes") is None:
            return {}
        from bitsandbytes.optim import AdamW8bit

        leaf = torch.nn.Parameter(weight)
        leaf.grad, optimizer = gradient, AdamW8bit([leaf], lr=1e-4)
        return {"bitsandbytes, 8 bits": timed(optimizer.step)}

    flat, held, fine = gradient.view(-1), total.cpu(), FineRounding(32, 1)
    scales = [torch.full((size,), 0.7) for size in shape]
    small = SmallRounding([Rectangle.whole("w", shape)], scales, step=1)

    def adding(rounding: Rounding, to: torch.Tensor) -> float:
        return timed(lambda: rounding.add(to, flat, 0, index=0))

    return {
        "torch, fused": fused(),
        **bitsandbytes(),
        "ours": ours(),
        "ours, lead": ours(lead=2.5),
        "ours, 8 bits": ours(state="8bit"),
        "average": timed(lambda: average(total, flat, scale=1e-9, rounding=fine, place=0)),
        "norm, on the host": timed(lambda: square_norm(held, rounding=fine, place=0)),
        "check a gradient": timed(lambda: largest_magnitude([gradient])),
        "add, fp32": adding(NoRounding(), torch.zeros_like(flat)),
        "add, int64": adding(fine, torch.zeros_like(total)),
        "add, small": adding(small, torch.zeros_like(flat, dtype=torch.int32)),
        "add, small, int64": adding(small, torch.zeros_like(total)),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = Benchmark(__doc__)
    parser.add_argument("--parameters", type=int, default=1 << 22)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    chosen = parser.asked()
    torch.set_num_threads(1)
    kernel_build.prepare(threads=1).join()
    found = {}
    for way in ("kernels", "reference"):
        with kernels.tried(kernels.used() if way == "kernels" else None):
            found[way] = measure(chosen.parameters, chosen.turns, torch.device(chosen.device))
    print(f"{'ns a parameter':20} {'kernels':>9} {'reference':>9}")
    for name, nanoseconds in found["kernels"].items():
        print(f"{name:20} {nanoseconds:9.2f} {found['reference'][name]:9.2f}")
    write(chosen.json, found)


if __name__ == "__main__":
    main()
