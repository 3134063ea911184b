"""What each policy of `memory.activations` keeps of a microbatch, and what it costs, over a stash in the same run.

    python benchmarks/activations.py [--layers N] [--width N] [--tokens N] [--turns N] [--device cpu|cuda]
                                     [--steps N] [--json FILE]

A stage in the middle of a model. Per policy and `numerics.compute`, over stash in fp32: seconds of forward, backward
and weight pass (the median of turns, policies by turns); bytes kept between forward and backward, beside the input;
kept between backward and weight pass; and the peak of all three. Bytes are those of live tensors (`live_bytes.py`),
the stash's in MiB for scale. "offload" runs on CUDA only.

Then `optimizer.state = "8bit"`. How far updates are off (rms, of their own) for moments of heavy-tailed gradients,
beside bitsandbytes' dynamic map rounded to the nearest value. Over "fp32": bytes of moments, seconds of an update, the
mean loss of the last 20 of --steps steps and the held-out loss, of a small decoder on the default data, trained by
`swarmnet.testing.reference`. --steps 0 leaves the training out.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from harness import Benchmark, write
from live_bytes import LiveBytes
from torch import Tensor

from swarmnet.data.source import load_tokens
from swarmnet.manifest.schema import Cut, Data, Manifest, Model, Optimizer, Training
from swarmnet.model.decoder import StageModule
from swarmnet.stage.optimizer import StageOptimizer
from swarmnet.stage.optimizer_8bit import BLOCK, PackedMoments
from swarmnet.stage.passes import MemoryPolicy, Passes
from swarmnet.testing.reference import run_reference

POLICIES = ("save", "selective", "recompute_layers", "recompute", "offload")
SMOOTH = 20


class Case:
    """One policy in one precision, on a module that all share."""

    def __init__(
        self, module: StageModule, scratch: dict[Tensor, Tensor], policy: str, compute: str, device: torch.device
    ) -> None:
        self.policy, self.compute = policy, compute
        self._module, self._scratch, self._device = module, scratch, device
        self._passes = Passes(
            last=False, device=device, reproducible=False, memory=MemoryPolicy(policy), compute=compute
        )
        self.seconds: list[float] = []

    def run(self, tokens: Tensor, hidden: Tensor, gradient: Tensor, after: Callable[[], object] = int) -> float:
        """One microbatch; returns its seconds. after: called after forward, backward and weight pass."""
        x = hidden.clone()
        began = self._now()
        _, work = self._passes.forward(self._module, tokens, x, train=True)
        del _
        after()
        self._passes.backward(work, gradient)
        after()
        work.tape.weight_pass(self._scratch.__getitem__)
        after()
        return self._now() - began

    def kept(self, tokens: Tensor, hidden: Tensor, gradient: Tensor) -> tuple[int, int, int]:
        """Bytes (after forward, after backward, at the peak)."""
        with LiveBytes() as live:
            self.run(tokens, hidden, gradient)  # meets what lasts: weights, and casts, which are made once
            live.take()
            now, peak, marks = 0, 0, []

            def mark() -> None:
                nonlocal now, peak
                for delta in live.take():
                    now += delta
                    peak = max(peak, now)
                marks.append(now)

            self.run(tokens, hidden, gradient, mark)
        own = hidden.nbytes  # its input
        return marks[0] - own, marks[1] - own, peak - own

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def activations(layers: int, width: int, tokens: int, turns: int, device: torch.device) -> list[dict]:
    """A row per policy and precision."""
    model = Model(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_layers=layers,
        num_heads=width // 64,
        num_kv_heads=max(1, width // 128),
        head_dim=64,
    )
    with device:
        module = StageModule(model, range(layers), first=False, last=False)
    module.reset(seed=0)
    ids = torch.zeros(2, tokens // 2 + 1, dtype=torch.int32)
    hidden, gradient = (torch.randn(2, tokens // 2, width, device=device) for _ in range(2))
    scratch = {parameter: torch.empty_like(parameter) for parameter in module.parameters()}
    policies = [policy for policy in POLICIES if policy != "offload" or device.type == "cuda"]
    cases = [
        Case(module, scratch, policy, compute, device)
        for compute, policy in itertools.product(("fp32", "bf16"), policies)
    ]
    kept = [case.kept(ids, hidden, gradient) for case in cases]
    for _ in range(turns):
        for case in cases:
            case.seconds.append(case.run(ids, hidden, gradient))
    base, seconds = kept[0], statistics.median(cases[0].seconds)
    return [
        {
            "policy": case.policy,
            "compute": case.compute,
            "seconds": statistics.median(case.seconds) / seconds,
            "forward": own[0] / base[0],
            "backward": own[1] / base[0],
            "peak": own[2] / base[2],
            "mib": own[0] / 2**20,
            "peak_mib": own[2] / 2**20,
            "tokens": tokens,
        }
        for case, own in zip(cases, kept, strict=True)
    ]


def moments(turns: int, device: torch.device) -> dict:
    """8-bit over fp32: bytes of moments, seconds of an update."""
    shapes = [(2048, 1024), (1024, 1024), (1024,)]
    ratio = {}
    for state in ("fp32", "8bit"):
        weights = [torch.randn(shape, device=device) for shape in shapes]
        optimizer = StageOptimizer(weights, Optimizer(state=state))
        gradients, seconds = [torch.randn_like(weight) for weight in weights], []
        for _ in range(turns + 1):
            began = time.perf_counter()
            optimizer.step(gradients, learning_rate=1e-3)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        ratio[state] = sum(each.num_bytes for each in optimizer.moments), statistics.median(seconds[1:])
    return {"bytes": ratio["8bit"][0] / ratio["fp32"][0], "seconds": ratio["8bit"][1] / ratio["fp32"][1]}


def rounding(count: int = 1 << 19) -> dict:
    """How far m / sqrt(v) is off after rounding m and v: ours, and by bitsandbytes' map."""
    from bitsandbytes.functional import create_dynamic_map

    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(count // 512, 1, generator=generator), torch.randn(1, 512, generator=generator)
    sizes = torch.exp(1.5 * rows + 0.7 * columns).view(-1)
    first, second = torch.zeros(count), torch.zeros(count)
    for step in range(60):
        seen = torch.rand(count, generator=generator) < (0.3 if step % 2 else 1.0)
        gradient = sizes * torch.randn(count, generator=generator) * seen
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.05)
    update = first / second.sqrt()

    def nearest(values: Tensor, code: Tensor) -> Tensor:
        blocks = values.view(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        return (code[torch.bucketize(blocks / largest, (code[1:] + code[:-1]) / 2)] * largest).view(-1)

    def off(m: Tensor, v: Tensor) -> float:
        return float(((m / (v.sqrt() + 1e-12) - update).square().mean() / update.square().mean()).sqrt())

    packed = PackedMoments(first)
    packed.write(first, second)
    theirs = (nearest(first, create_dynamic_map(True)), nearest(second, create_dynamic_map(False)))
    return {"off": off(*packed.read()), "bitsandbytes_off": off(*theirs)}


def training(steps: int) -> dict:
    """8-bit over fp32: loss at the end, and held-out loss."""
    tokens, found = load_tokens("stdlib"), {}
    for state in ("fp32", "8bit"):
        manifest = Manifest(
            model=Model(hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16),
            cut=Cut(stages=1),
            data=Data(source=tokens.source),
            optimizer=Optimizer(state=state),
            training=Training(total_steps=steps, eval_every=steps, eval_microbatches=32),
        )
        result = run_reference(manifest, tokens)
        found[state] = sum(result.losses[-SMOOTH:]), result.evals[steps]
    return {"loss": found["8bit"][0] / found["fp32"][0], "held_out": found["8bit"][1] / found["fp32"][1]}


def main() -> None:
    parser = Benchmark(__doc__)
    for name, default in (("layers", 4), ("width", 512), ("tokens", 512), ("turns", 7), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    chosen = parser.asked()
    torch.set_num_threads(1)
    device = torch.device(chosen.device)
    rows = activations(chosen.layers, chosen.width, chosen.tokens, chosen.turns, device)
    print(
        f"{'policy':18} {'compute':7} {'time':>6} {'kept':>6} {'after backward':>15} {'peak':>6}   "
        f"(1.00: a stash in fp32, {rows[0]['mib']:.0f} MiB)"
    )
    for row in rows:
        print(
            f"{row['policy']:18} {row['compute']:7} {row['seconds']:6.2f} {row['forward']:6.3f} "
            f"{row['backward']:15.2f} {row['peak']:6.2f}"
        )
    result = {"activations": rows, "8bit": moments(chosen.turns, device) | rounding()}
    text = "8-bit moments: updates off by {off:.4f}, by bitsandbytes' map {bitsandbytes_off:.4f}"
    print(text.format(**result["8bit"]))
    print("8-bit moments over fp32: bytes {bytes:.3f}, seconds of an update {seconds:.2f}".format(**result["8bit"]))
    if chosen.steps:
        result["8bit"] |= training(chosen.steps)
        print("8-bit moments over fp32: loss at the end {loss:.4f}, held out {held_out:.4f}".format(**result["8bit"]))
    write(chosen.json, result)


if __name__ == "__main__":
    main()
