"""Every reducer against every attack: the loss a run ends with when two of eight replicas lie about their gradients.

    python benchmarks/robust.py [--steps N] [--seeds N] [--reducer NAME]... [--attack NAME]... [--json FILE]

A tiny decoder, eight replicas with one microbatch each per step, whose vectors the reducer takes to one, as with
`averaging.sync = "local"` and an outer step after every step. No gradient is clipped: what is measured is the reducer.
The clean run is the plain sum of correct gradients; a cell is the held-out loss at the end divided by the clean run's,
the median over seeds. 1.00 is no harm.

    sign_flip   minus the gradient                   flip_x10   minus ten times the gradient
    scaled      the gradient by up to a million,     random     noise, ten times as long as the gradient
                another factor every step            collude    minus the honest mean, twice the median long:
                                                                just inside a norm clip
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
from harness import Benchmark, write
from torch import Tensor

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Averaging, Model
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.stage.interfaces import Contribution
from swarmnet.sums.reducer import float_sum, rule_of
from swarmnet.wire import codecs

REPLICAS, LIARS, EVALS = 8, 2, 8
REDUCERS = ("sum", "norm_clip", "centered_clip")

Attack = Callable[[int, Tensor, Sequence[Tensor], torch.Generator], Tensor]
"""(step, the liar's own gradient, the honest ones, randomness) -> what it sends."""


def _random(step: int, own: Tensor, honest: Sequence[Tensor], rng: torch.Generator) -> Tensor:
    noise = torch.randn(own.shape, generator=rng)
    return noise * (10 * own.norm() / noise.norm())


def _collude(step: int, own: Tensor, honest: Sequence[Tensor], rng: torch.Generator) -> Tensor:
    mean = torch.stack(list(honest)).mean(0)
    length = statistics.median(float(each.norm()) for each in honest)
    return mean * (-2.0 * length / float(mean.norm()))


ATTACKS: dict[str, Attack] = {
    "sign_flip": lambda step, own, honest, rng: -own,
    "flip_x10": lambda step, own, honest, rng: -10.0 * own,
    "scaled": lambda step, own, honest, rng: own * float(10 ** (6 * torch.rand((), generator=rng))),
    "random": _random,
    "collude": _collude,
}


MODEL = Model(
    vocab_size=61, hidden_size=16, intermediate_size=56, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)
LENGTH, ROWS = 16, 16


class Replicas:
    """Eight replicas of one model, equal at every step; the first LIARS of them send what `attack` makes of their
    gradient. Each step is an average, as an outer step of local sync after every step is."""

    def __init__(self, reducer: str, attack: Attack | None, *, steps: int, seed: int) -> None:
        self._attack, self._steps = attack, steps
        self._module = StageModule(MODEL, range(1), first=True, last=True)
        self._module.reset(seed=seed)
        walk = np.random.default_rng(5).integers(0, 3, 20_000).cumsum() % MODEL.vocab_size
        self._tokens = Tokens(walk.astype(np.uint8), vocab_size=61, source="walk", tokenizer_sha256="0" * 64)
        self._sampler = Sampler(seed, self._tokens.num_tokens, LENGTH, ROWS)
        self._rng = torch.Generator().manual_seed(seed)
        self._adamw = torch.optim.AdamW(self._module.parameters(), lr=2e-2, betas=(0.9, 0.95), weight_decay=0.1)
        self._rule = rule_of(Averaging(sync="local", codec="fp32", reducer=reducer))
        self._center: Tensor | None = None
        self.clipped: dict[str, int] = {}

    def _loss(self, number: int) -> Tensor:
        batch = self._tokens.microbatch(self._sampler.positions(number), LENGTH)
        return loss_sum(self._module(batch[:, :-1]), batch[:, 1:])

    def step(self, step: int) -> None:
        """Every replica's gradient, those of the liars changed, reduced and applied."""
        parameters = list(self._module.parameters())
        sent = []
        for index in range(REPLICAS):
            self._module.zero_grad()
            self._loss(step * REPLICAS + index).backward()  # type: ignore[no-untyped-call]
            sent.append(torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]))
        for liar in range(LIARS if self._attack is not None else 0):
            assert self._attack is not None
            sent[liar] = self._attack(step, sent[liar], sent[LIARS:], self._rng)
        given = [
            Contribution(PeerId(f"replica{place}"), 1, codecs.encode("fp32", each)) for place, each in enumerate(sent)
        ]
        total, clipped = float_sum(self._rule, given, sent[0].numel(), self._center, codec="fp32")
        self._center = total / REPLICAS
        for each in clipped:
            self.clipped[each.peer] = self.clipped.get(each.peer, 0) + 1
        mean = total / (REPLICAS * ROWS * LENGTH)
        for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        self._adamw.param_groups[0]["lr"] = 2e-2 * min((step + 1) / 10, 1.0)
        self._adamw.step()

    @torch.no_grad()
    def held_out(self) -> float:
        """The mean loss on microbatches that no step has seen."""
        total = sum(float(self._loss(self._steps * REPLICAS + number)) for number in range(EVALS))
        return total / (EVALS * ROWS * LENGTH)


def train(reducer: str, attack: str | None, *, steps: int, seed: int = 0) -> tuple[float, dict[str, int]]:
    """(held-out loss at the end, in how many steps each replica was clipped)."""
    replicas = Replicas(reducer, None if attack is None else ATTACKS[attack], steps=steps, seed=seed)
    for step in range(steps):
        replicas.step(step)
    return replicas.held_out(), replicas.clipped


def main() -> None:
    """Print the table; write it as JSON where asked."""
    parser = Benchmark(__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--reducer", action="append", choices=REDUCERS)
    parser.add_argument("--attack", action="append", choices=tuple(ATTACKS))
    options = parser.asked()
    torch.set_num_threads(1)
    attacks: list[str | None] = [None, *(options.attack or ATTACKS)]
    clean = [train("sum", None, steps=options.steps, seed=seed)[0] for seed in range(options.seeds)]
    print(f"{REPLICAS} replicas, {LIARS} liars, {options.steps} steps; clean loss {statistics.median(clean):.4f}")
    print(f"{'':14}" + "".join(f"{attack or 'nobody':>11}" for attack in attacks))
    rows = []
    for reducer in options.reducer or REDUCERS:
        row: dict[str, object] = {"reducer": reducer}
        for attack in attacks:
            found = [train(reducer, attack, steps=options.steps, seed=seed)[0] for seed in range(options.seeds)]
            row[attack or "nobody"] = statistics.median(one / base for one, base in zip(found, clean, strict=True))
        rows.append(row)
        print(f"{reducer:14}" + "".join(f"{row[attack or 'nobody']:11.3f}" for attack in attacks), flush=True)
    write(options.json, {"clean_loss": statistics.median(clean), "rows": rows})


if __name__ == "__main__":
    main()
