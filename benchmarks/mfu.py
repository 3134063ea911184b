"""Training steps of one whole stage on one device: their time beside a plain torch loop, and model FLOP utilisation.

    python benchmarks/mfu.py [--compute bf16] [--device cuda] [--turns N] [--json FILE] [--quick]

Ours is what a replica's compute thread does: forward, backward and weight pass of each microbatch, checks and sum of
the gradients, clipping, AdamW. The plain loop is the same decoder under autograd and autocast, with clip_grad_norm_ and
torch's fused AdamW. They take turns on the same weights and microbatches, and a ratio is the median over turns of
ours / plain; their losses are compared before it.

    MFU = (6 P + 6 L H C T) n / (t F)          (arXiv:2204.02311, appendix B)

with n the tokens of a step, t its seconds, P the parameters that a token meets in matrix products (all matrices but the
embedding, which is a look-up), L layers of H heads of C channels, sequences of T tokens, of which causal attention
looks at half, and F the device's peak in dense bf16 products (tensor cores), by its name. Recomputing does not count.
No figure for devices that the table does not know, such as every CPU.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Benchmark, in_turns, ratio, write
from torch import Tensor

from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Optimizer, Training
from swarmnet.messages import Commit
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.model.precision import Compute
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.canonical import learning_rate

PEAK_TERAFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense bf16 with fp32 accumulation, from the makers' data sheets; the first name found in the device's holds."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained."""

    model: Model
    microbatches: int
    microbatch_size: int
    sequence_length: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    def manifest(self, compute: Compute) -> Manifest:
        """The run: one stage."""
        return Manifest(
            model=self.model,
            cut=Cut(stages=1),
            averaging=Averaging(codec="small"),
            numerics=Numerics(mode="fast", compute=compute),
            optimizer=Optimizer(learning_rate=3e-4, schedule="constant", warmup_steps=0),
            training=Training(
                total_steps=100,
                microbatches=self.microbatches,
                microbatch_size=self.microbatch_size,
                sequence_length=self.sequence_length,
                eval_every=0,
            ),
        )

    def batches(self) -> list[Tensor]:
        """The microbatches of every step: tokens and last labels [B, T + 1], the same each time."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches, self.microbatch_size, self.sequence_length + 1)
        return list(torch.randint(self.model.vocab_size, shape, generator=generator, dtype=torch.int32))


TINY = Size(
    Model(
        vocab_size=128, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
    ),
    microbatches=2,
    microbatch_size=1,
    sequence_length=32,
)
CPU = Size(
    Model(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64
    ),
    microbatches=3,
    microbatch_size=2,
    sequence_length=256,
)
GPU = Size(
    Model(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=8,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    ),
    microbatches=4,
    microbatch_size=4,
    sequence_length=2048,
)


def fitting(device: torch.device) -> Size:
    """Large enough to keep the device busy, and no larger than both ways together fit: about 30 GB on a GPU, a third of
    that on one with less than 40."""
    if device.type != "cuda":
        return CPU
    if torch.cuda.get_device_properties(device).total_memory > 40e9:
        return GPU
    return Size(GPU.model.model_copy(update={"num_layers": 4}), GPU.microbatches, 1, GPU.sequence_length)


Step = Callable[[], float]
"""Trains one step; returns its mean loss."""


class Replica:
    """A replica's arithmetic without its network; call it to train a step. options: of DeviceBackend."""

    def __init__(self, manifest: Manifest, batches: Sequence[Tensor], device: torch.device, **options: Any) -> None:
        self.body = DeviceBackend(manifest.of_stage(0), device=device, **options)
        self.body.state.reset_to_seed()
        self._batches = batches
        self._num_tokens = sum(batch[:, 1:].numel() for batch in batches)

    def __call__(self) -> float:
        """See Step."""
        state, total = self.body.state, self.body.sums[0]
        version, loss = state.version, 0.0
        for index, batch in enumerate(self._batches):
            output, work = self.body.forward(version, batch, None, train=True)
            assert work is not None
            loss += output.item()
            self.body.backward(work, None)
            added = self.body.accumulate(work, step=version, index=index, discards=total.discards)
            assert added
        gradient = total.read(version)
        square = state.square_norm(gradient)
        round_id = RoundId(Ballot(0, PeerId("benchmark")), 0)
        state.apply(gradient, [Commit(0, version, Chain(""), round_id, b"", self._num_tokens, loss, square)])
        return loss / self._num_tokens


def plain(manifest: Manifest, batches: Sequence[Tensor], device: torch.device, *, compute: Compute) -> Step:
    """A loop as anybody writes it."""
    table, training = manifest.optimizer, manifest.training
    module = StageModule(manifest.model, range(manifest.model.num_layers), first=True, last=True)
    module.reset(seed=training.seed)
    module.to(device)
    parameters = list(module.parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": table.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(table.beta1, table.beta2),
        eps=table.eps,
        fused=True,
    )
    num_tokens = sum(batch[:, 1:].numel() for batch in batches)
    version = 0

    def step() -> float:
        nonlocal version
        loss = 0.0
        for batch in batches:
            here = batch.to(device)
            with autocast(device, compute):
                logits = module(here[:, :-1])
            one = loss_sum(logits, here[:, 1:])
            (one / num_tokens).backward()  # type: ignore[no-untyped-call]
            loss += one.item()
        torch.nn.utils.clip_grad_norm_(parameters, table.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(table, version, total_steps=training.total_steps)
        adamw.step()
        adamw.zero_grad(set_to_none=False)
        version += 1
        return loss / num_tokens

    return step


def autocast(device: torch.device, compute: Compute) -> contextlib.AbstractContextManager[object]:
    """Matrix products in bf16, if that is asked for."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if compute == "bf16" else contextlib.nullcontext()


def timed(step: Step, device: torch.device) -> float:
    """Seconds of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def flops_per_step(size: Size) -> float:
    """See the module."""
    model = size.model
    with torch.device("meta"):
        module = StageModule(model, range(model.num_layers), first=True, last=True)
    shapes = {name: parameter for name, parameter in module.named_parameters() if parameter.ndim == 2}
    if not model.tie_embeddings:  # a tied matrix is the head's as well
        del shapes["model.embed_tokens.weight"]
    products = sum(parameter.numel() for parameter in shapes.values())
    attention = model.num_layers * model.num_heads * model.head_dim * size.sequence_length
    return 6.0 * (products + attention) * size.tokens


def peak_flops(device: torch.device) -> float | None:
    """Of this device in bf16; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for known, peak in PEAK_TERAFLOPS.items() if known in name), None)


def measure(size: Size, device: torch.device, compute: Compute, *, turns: int, steps: int = 3) -> dict[str, Any]:
    """Both ways in turns, after `steps` steps each: {"losses", "ours", "plain", "ratio", "mfu"}."""
    manifest, batches = size.manifest(compute), size.batches()
    ways: dict[str, Step] = {
        "ours": Replica(manifest, batches, device),
        "plain": plain(manifest, batches, device, compute=compute),
    }
    losses = {name: [step() for _ in range(steps)] for name, step in ways.items()}
    seconds = in_turns({name: partial(timed, step, device) for name, step in ways.items()}, turns, warmup=0)
    peak = peak_flops(device)
    mfu = None if peak is None else flops_per_step(size) / statistics.median(seconds["ours"]) / peak
    return {"losses": losses, **seconds, "ratio": ratio(seconds["ours"], seconds["plain"]), "mfu": mfu}


def main() -> None:
    """Measure, print, write JSON if asked."""
    parser = Benchmark(__doc__, quick="a tiny stage, two turns: that it runs, not how fast")
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.asked()
    device = torch.device(asked.device)
    size = TINY if asked.quick else fitting(device)
    found = measure(size, device, asked.compute, turns=2 if asked.quick else asked.turns)
    for name in ("ours", "plain"):
        middle = statistics.median(found[name])
        print(
            f"{name:6} {middle * 1e3:9.1f} ms a step {size.tokens / middle:10.0f} tokens/s   losses "
            + " ".join(f"{loss:.4f}" for loss in found["losses"][name])
        )
    utilised = "unknown for this device" if found["mfu"] is None else f"{found['mfu']:.1%}"
    print(f"ours / plain {found['ratio']:.2f}   MFU {utilised}   load {os.getloadavg()[0]:.1f}")
    write(asked.json, found)


if __name__ == "__main__":
    main()
