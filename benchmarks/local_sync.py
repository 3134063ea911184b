"""Training with `sync = "local"` beside exact training: equal tokens, equal order of them, equal first weights.

    python benchmarks/local_sync.py [--steps N] [--replicas N] [--seeds N] [--only NAME]... [--set FIELD=VALUE]...
                                    [--json FILE] [--png FILE]

A small decoder on the default data (Python's standard library, as bytes). Every step's microbatches are dealt to the
replicas anew, at random and not evenly, as a swarm's routers do. *exact* averages gradients in fp32 in every step; the
others train on their own and take outer steps now and then, under the settings printed. Arithmetic, codecs and
error feedback are the product's (`stage.outer`, `sums.sum_codec`, `sums.references`); only the network is left out.

Printed per setting: the held-out loss of the weights one takes home, over that of exact (1.00 is no harm), worst and
mean of all seeds, and how many times fewer bytes a replica sends for averaging. Goals: at most 1.03, at least 50 times.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from harness import Benchmark, write
from torch import Tensor

from swarmnet.averaging.grid import random_groups
from swarmnet.data.sampler import Sampler
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import Tokens
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.manifest.implied import PARTNERS, PARTNERS_MOMENTUM, PARTNERS_WARMUP_STEPS, SPARSE_INNER_STEPS
from swarmnet.manifest.schema import Averaging, Model, Optimizer
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.stage.canonical import clip_factor, learning_rate
from swarmnet.stage.optimizer import StageOptimizer
from swarmnet.stage.outer import Outer
from swarmnet.sums.local_sum import DENSE, OuterPlan
from swarmnet.sums.references import TURNS, References
from swarmnet.sums.sum_codec import SumCodec
from swarmnet.wire import codecs

MODEL = Model(hidden_size=32, intermediate_size=88, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
OPTIMIZER = Optimizer(learning_rate=3e-3, warmup_steps=10)
MICROBATCHES, MICROBATCH_SIZE, LENGTH = 8, 8, 64
EVALS = 32
LOSS_GOAL, BYTES_GOAL = 1.03, 50.0
SMOOTH = 20
"""Steps a curve is averaged over."""


DEFAULT = Averaging()


@dataclass(frozen=True, slots=True)
class Setting:
    """partners "": exact. The rest as in a manifest's `averaging`, with its defaults."""

    name: str
    partners: str = "all"
    inner_steps: int = DEFAULT.inner_steps
    outer_warmup_steps: int = DEFAULT.outer_warmup_steps
    outer_learning_rate: float = DEFAULT.outer_learning_rate
    outer_momentum: float = DEFAULT.outer_momentum
    fragments: int = 1
    codec: str = "fp32"


GROUPS = {"pairs": 2, "groups": PARTNERS}
PAIRS = {"partners": "pairs", "outer_momentum": PARTNERS_MOMENTUM, "outer_warmup_steps": PARTNERS_WARMUP_STEPS}

SETTINGS = (
    Setting("exact", partners=""),
    Setting("diloco"),
    Setting("diloco, int8", codec="int8"),
    Setting("streaming, int8", fragments=4, codec="int8"),
    Setting("noloco, fp16", codec="fp16", **PAIRS),
    Setting("noloco in parts", fragments=4, codec="fp16", **PAIRS),
    Setting("sparse 5 %", inner_steps=SPARSE_INNER_STEPS, codec="sparse:0.05"),
    Setting("diloco, rare", inner_steps=52),
    Setting("noloco, rare", inner_steps=35, **PAIRS),
    Setting("noloco", **PAIRS),
    Setting("noloco, int8", codec="int8", **PAIRS),
    Setting("noloco, nf4", codec="nf4", **PAIRS),
    Setting("streaming, nf4", inner_steps=24, fragments=4, codec="nf4"),
    Setting("groups of 4, int8", codec="int8", **PAIRS | {"partners": "groups"}),
)
"""The rare ones reach the goal for bytes without a codec."""


class Replica:
    """One whole model and what it keeps to itself."""

    def __init__(self, setting: Setting, seed: int, steps: int) -> None:
        self.module = StageModule(MODEL, range(MODEL.num_layers), first=True, last=True)
        self.module.reset(seed=seed)
        self.parameters = list(self.module.parameters())
        self._optimizer = StageOptimizer(self.parameters, OPTIMIZER)
        self.num_elements = sum(p.numel() for p in self.parameters)
        self.codec = SumCodec(setting.codec, self.num_elements, device=torch.device("cpu"))
        self.dense = self.codec
        if setting.codec.startswith("sparse:"):
            self.dense = SumCodec(DENSE, self.num_elements, device=torch.device("cpu"))
        self.references = References(setting.codec)
        self.outer = Outer(
            self.parameters,
            gossip=GROUPS.get(setting.partners, 0),
            learning_rate=setting.outer_learning_rate,
            momentum=setting.outer_momentum,
        )
        self._steps, self.count, self.num_tokens, self.sent_bytes = steps, 0, 0, 0

    def compute(self, batches: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """The summed loss of these microbatches, which are its share of a step, and its gradient."""
        self.count = len(batches)
        if not batches:
            self.num_tokens = 0
            return 0.0, [torch.zeros_like(p) for p in self.parameters]
        batch = torch.cat(list(batches))
        self.num_tokens = batch[:, 1:].numel()
        loss = loss_sum(self.module(batch[:, :-1]), batch[:, 1:])
        return loss.item(), list(torch.autograd.grad(loss, self.parameters))

    def update(self, gradient: Sequence[Tensor], step: int) -> None:
        """Average, clip, AdamW."""
        squares = [_norm(gradient) ** 2]
        scale = clip_factor(squares, num_tokens=self.num_tokens, clip_norm=OPTIMIZER.clip_norm) / self.num_tokens
        rate = learning_rate(OPTIMIZER, step, total_steps=self._steps)
        self._optimizer.step([each * scale for each in gradient], learning_rate=rate)


class Run:
    """All replicas of one setting."""

    def __init__(self, setting: Setting, tokens: Tokens, *, replicas: int, steps: int, seed: int) -> None:
        self.setting, self._tokens, self._steps = setting, tokens, steps
        self._sampler = Sampler(seed, tokens.num_tokens, LENGTH, MICROBATCH_SIZE)
        self.replicas = [Replica(setting, seed, steps) for _ in range(replicas if setting.partners else 1)]
        self._num_replicas = replicas
        self._plan = OuterPlan(
            self.replicas[0].num_elements, setting.inner_steps, setting.fragments, steps, setting.outer_warmup_steps
        )
        self._rng = random.Random(seed)
        for replica in self.replicas:
            replica.references.begin(replica.outer.slow)

    def _batch(self, number: int) -> Tensor:
        return self._tokens.microbatch(self._sampler.positions(number), LENGTH)

    def step(self, step: int) -> float:
        """One step of everybody; the mean loss of its microbatches."""
        shares: list[list[Tensor]] = [[] for _ in self.replicas]
        for index in range(MICROBATCHES):
            self._rng.choice(shares).append(self._batch(step * MICROBATCHES + index))
        computed = [replica.compute(share) for replica, share in zip(self.replicas, shares, strict=True)]
        loss, gradients = math.fsum(loss for loss, _ in computed), [gradient for _, gradient in computed]
        num_tokens = sum(replica.num_tokens for replica in self.replicas)
        if self.setting.partners:
            self._local(step, gradients)
        else:
            self.replicas[0].update(gradients[0], step)
            whole = 4 * self.replicas[0].num_elements
            self.replicas[0].sent_bytes += _butterfly_bytes(whole, whole, self._num_replicas)
        return loss / num_tokens

    def _local(self, step: int, gradients: Sequence[list[Tensor]]) -> None:
        due = self._plan.due(step)
        if due is not None:
            turn, plain = self._plan.turn(step), self._plan.plain(step)
            if self.setting.partners in GROUPS:
                names = {PeerId(f"{number}"): replica for number, replica in enumerate(self.replicas)}
                for group in random_groups(names, GROUPS[self.setting.partners], 0, turn % TURNS):
                    self._meet([names[name] for name in group], due, turn, plain=plain)
            else:
                self._outer_step(self.replicas, *due, plain=plain, dense=self._plan.sends_all(step))
        for replica, gradient in zip(self.replicas, gradients, strict=True):
            replica.sent_bytes += _butterfly_bytes(4, 4, len(self.replicas))
            if replica.count:
                replica.update(gradient, step)

    def _meet(self, group: list[Replica], due: tuple[int, int], turn: int, *, plain: bool) -> None:
        """A round among partners."""
        cycle, turn = divmod(turn, TURNS)
        for replica in group:
            replica.references.open(turn, due, first=not cycle)
        size, whole = due[1] - due[0], len({replica.references.digest for replica in group}) > 1
        vectors = []
        for replica in group:
            sent = replica.references.encode(replica.outer.vector(*due, plain=plain), 0, whole=whole)
            vectors.append(replica.references.decode(sent, 0, size))
        reduced = group[0].references.encode(torch.stack(vectors).mean(0), 0, whole=whole)
        for replica in group:
            mean = replica.references.decode(reduced, 0, size)
            replica.outer.step(mean, due[0], plain=plain)
            replica.references.agreed(turn, due, mean)
            replica.sent_bytes += _butterfly_bytes(sent.num_bytes, reduced.num_bytes, len(group))

    def _outer_step(self, group: list[Replica], start: int, stop: int, *, plain: bool, dense: bool) -> None:
        """A round. Contributions weigh what their members have counted in this step. Under a sparse codec what is not
        sent stays in the weights."""
        sparse = not dense and self.setting.codec.startswith("sparse:")
        weights = {replica: replica.count for replica in group}
        sent, total, unsent = 0, torch.zeros(group[0].num_elements), dict[Replica, Tensor]()
        round_id = RoundId(Ballot(0, PeerId("")), 0)
        for replica, weight in weights.items():
            if weight:
                mine = torch.zeros(replica.num_elements)
                mine[start:stop] = replica.outer.vector(start, stop, plain=plain) * weight
                codec = replica.dense if dense else replica.codec
                codec.begin(round_id)
                packed = codec.contribution(mine, start, stop)
                decoded = codecs.decode(packed)
                total[start:stop] += decoded
                sent = packed.num_bytes
                if sparse:
                    unsent[replica] = (mine[start:stop] - decoded) / weight
        codec = group[0].dense if dense else group[0].codec
        reduced = codec.sum(total[start:stop].clone(), start)
        mean = codecs.decode(reduced) / sum(weights.values())
        for replica, weight in weights.items():
            replica.outer.step(mean, start, mine=weight > 0, unsent=unsent.get(replica), plain=plain)
            replica.codec.applied(round_id)
            replica.sent_bytes += _butterfly_bytes(sent, reduced.num_bytes, len(group))

    @torch.no_grad()
    def held_out(self) -> float:
        """On microbatches that no step has seen, of the mean of all slow weights (exact: of the weights)."""
        replica = self.replicas[0]
        if self.setting.partners:
            slow = torch.stack([each.outer.slow for each in self.replicas]).mean(0)
            for start, piece in replica.outer._pieces(0, replica.num_elements):
                piece.copy_(slow[start : start + piece.numel()])
        total = 0.0
        for number in range(EVALS):
            batch = self._batch(self._steps * MICROBATCHES + number)
            total += loss_sum(replica.module(batch[:, :-1]), batch[:, 1:]).item()
        return total / (EVALS * MICROBATCH_SIZE * LENGTH)


def _norm(gradient: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(torch.linalg.vector_norm(each, dtype=torch.float64).item() ** 2 for each in gradient))


def _butterfly_bytes(contributed: int, reduced: int, members: int) -> float:
    """What one of so many members sends: the others' parts of its vector, and its reduced part to all others."""
    return (contributed + reduced) * (members - 1) / members


def train(setting: Setting, tokens: Tokens, *, steps: int, replicas: int, seed: int) -> dict:
    """{losses (each step's), held_out, bytes (one replica's, per step)}."""
    run = Run(setting, tokens, replicas=replicas, steps=steps, seed=seed)
    losses = [run.step(step) for step in range(steps)]
    sent = statistics.mean(replica.sent_bytes for replica in run.replicas)
    return {"losses": losses, "held_out": run.held_out(), "bytes": sent / steps}


def draw(rows: Sequence[dict], path: Path) -> None:
    """Loss curves of the first seed, and their ratio to exact."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = pyplot.colormaps["tab20"].colors
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    base = smooth(rows[0]["runs"][0]["losses"])
    for row, color in zip(rows, itertools.cycle(colors)):
        smoothed = smooth(row["runs"][0]["losses"])
        at = range(SMOOTH, SMOOTH + len(smoothed))
        label = f"{row['name']}  (bytes / {row['fewer_bytes']:.0f})"
        above.plot(at, smoothed, color=color, linewidth=1, label=label)
        below.plot(at, [one / other for one, other in zip(smoothed, base, strict=True)], color=color, linewidth=0.8)
    below.axhspan(1.0, LOSS_GOAL, alpha=0.15)
    below.set_ylim(0.98, 1.2)
    above.set_ylabel(f"training loss, mean of {SMOOTH} steps")
    below.set_ylabel("over exact's")
    below.set_xlabel("step")
    above.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of the last SMOOTH steps, at every step that has as many before it."""
    return [sum(losses[at - SMOOTH : at]) / SMOOTH for at in range(SMOOTH, len(losses) + 1)]


def main() -> None:
    parser = Benchmark(__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", action="append", help="names of settings; exact is always run")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of every setting")
    parser.add_argument("--data", default="stdlib", help="as data.source of a manifest")
    parser.add_argument("--png", type=Path)
    options = parser.asked()
    torch.set_num_threads(1)
    tokens = load_tokens(options.data)
    settings = [each for each in SETTINGS if not each.partners or not options.only or each.name in options.only]
    changes = {field: _parsed(value) for field, value in (each.split("=", 1) for each in options.set)}
    settings = [replace(each, **changes) if each.partners else each for each in settings]
    print(f"{options.replicas} replicas, {options.steps} steps, {options.seeds} seeds, {options.data}")
    print(
        f"{'setting':18}{'inner':>6}{'rate':>6}{'mom.':>6}{'held-out':>10}{'over exact':>12}{'worst':>8}"
        f"{'fewer bytes':>13}"
    )
    rows: list[dict] = []
    for setting in settings:
        runs = [
            train(setting, tokens, steps=options.steps, replicas=options.replicas, seed=seed)
            for seed in range(options.seeds)
        ]
        bases = rows[0]["runs"] if rows else runs
        ratios = [run["held_out"] / base["held_out"] for run, base in zip(runs, bases, strict=True)]
        row = {
            **asdict(setting),
            "runs": runs,
            "loss_ratio": statistics.mean(ratios),
            "worst_loss_ratio": max(ratios),
            "fewer_bytes": bases[0]["bytes"] / runs[0]["bytes"],
        }
        rows.append(row)
        met = row["loss_ratio"] <= LOSS_GOAL and row["fewer_bytes"] >= BYTES_GOAL
        verdict = "" if not setting.partners else "" if met else "  misses a goal"
        print(
            f"{setting.name:18}{setting.inner_steps:6}{setting.outer_learning_rate:6.2f}{setting.outer_momentum:6.2f}"
            f"{statistics.mean(run['held_out'] for run in runs):10.4f}{row['loss_ratio']:12.4f}"
            f"{row['worst_loss_ratio']:8.4f}{row['fewer_bytes']:12.1f}x{verdict}",
            flush=True,
        )
    write(options.json, {"rows": rows})
    if options.png is not None:
        draw(rows, options.png)


def _parsed(value: str) -> object:
    try:
        return json.loads(value)
    except ValueError:
        return value


if __name__ == "__main__":
    main()
