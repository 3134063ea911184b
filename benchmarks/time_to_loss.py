"""How long each way of training takes to one loss, on emulated lines: steps that are trained, times virtual seconds.

    python benchmarks/time_to_loss.py [--json FILE] [--steps N] [--lines 200x50,...] [--quick]

Steps: one small decoder (four layers of width 64, one a stage) on the default data, equal tokens in equal order from
equal weights, with four replicas; held-out loss every ten steps. Ours round activations and their gradients to int8 at
each of the three boundaries. A curve is a property of arithmetic, so it is trained once and serves all lines.

    exact       small sums (`swarmnet.testing.reference`, the bits of a swarm)
    overlap     a step late, with what `init` writes beside it
    local       outer steps in int8 every 20 steps (`local_sync.py`)
    1F1B, SWARM-like   fp32 sums
    DiLoCo      outer steps in fp32 every 20 steps, inside a worker 1F1B (arXiv:2311.08105)

Seconds: virtual time, a stage of three layers of width 1024 (38M parameters), at the pace at which `latency.py` has
SWARM's V100; four stages of four replicas, 16 microbatches of 4 x 512 tokens a replica. exact, overlap, local are whole
swarms of production classes; the others are `references.py`, each at its best. Outer rounds are bare bytes over
`inner_steps`. No model of that size is trained: that its steps to a loss compare as the small one's do is assumed.

The table has hours to two losses, and how many times sooner than SWARM-like each mode is there: the lowest loss that
all modes reach, and the lowest that all reach but those with outer steps, which take longer to it than is trained here.
Steps of overlap are exact ones up to OVERLAP_AFTER, sooner than `init` has it: these runs are short. One seed.

Last the public meter ProtocolNanoGPT (8 stages, 200 Mbit/s, 50 ms, loss 3.276: dense bf16 293,889 s, its subspace
reference 181,487 s): a scaled model of eight stages is trained with bf16 and with int8 at its seven boundaries
(`boundaries.py`), a GPT-2 of 124M is timed on virtual time, with bf16 under 1F1B and ours and with int8 under ours, and
what follows for the meter's seconds is printed as two projections. `--json` writes `rows`, `losses`, `steps`, `curves`
and `meter`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import boundaries
import latency
import local_sync
import torch
from plan_accuracy import Fleet, simulated
from references import all_reduce, one_f_one_b, swarm_like
from torch import Tensor

from swarmnet.data.sampler import Sampler
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import Tokens
from swarmnet.manifest.implied import LEAD
from swarmnet.manifest.schema import Averaging, Cut, Data, Manifest, Model, Numerics, Training
from swarmnet.model.decoder import Layer, StageModule, loss_sum
from swarmnet.plan.cost import BYTES, Load, Site, Way, cost
from swarmnet.testing.reference import run_reference

MODEL = Model(hidden_size=64, intermediate_size=176, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
STAGES, REPLICAS, SHARE, ROWS = 4, 4, 16, 4
STEPS, EVERY, EVALS, INNER, SEQUENCES = 200, 10, 8, 20, 4
OVERLAP_AFTER = 100
LINES = tuple(itertools.product((50, 200, 500), (10, 50, 200)))
"""(Mbit/s, round trip in ms)."""
SWARM = "SWARM-like"
MODES = ("exact", "overlap", "local", SWARM, "1F1B", "DiLoCo")
OUTER = ("local", "DiLoCo")
LAYERS, PACE = latency.LayerType("", 1024, 3, 1, ()), latency.LAYERS[-1].flops_per_s
"""Of a stage, and operations a second."""
Curve = list[tuple[int, float]]

DENSE_S, SUBSPACE_S = 293_889.0, 181_487.0
"""To loss 3.276, as the meter publishes them."""


# ---------------------------------------------------------------- steps to a loss


@contextlib.contextmanager
def coded(codec: str) -> Iterator[None]:
    """What leaves a layer, but the last one, arrives as `codec` leaves it; so do gradients on their way back."""
    passed = 0

    def begin(module: torch.nn.Module, _: Any) -> None:
        nonlocal passed
        passed = 0 if isinstance(module, StageModule) else passed

    def end(module: torch.nn.Module, _: Any, output: Tensor) -> Tensor | None:
        nonlocal passed
        passed += isinstance(module, Layer)
        if not isinstance(module, Layer) or passed == MODEL.num_layers:
            return None
        return boundaries.Boundary.apply(output, codec, codec)  # type: ignore[no-any-return, no-untyped-call]

    hooks = torch.nn.modules.module
    before, after = hooks.register_module_forward_pre_hook(begin), hooks.register_module_forward_hook(end)  # type: ignore[arg-type]
    try:
        yield
    finally:
        before.remove()
        after.remove()


def exact_curve(tokens: Tokens, steps: int, *, sync: str = "exact", codec: str = "small") -> Curve:
    """Of the reference process. codec: "small", or "fp32" for torch's own sums."""
    late, plain = sync == "overlap", codec == "fp32"
    manifest = Manifest(
        model=MODEL,
        cut=Cut(stages=STAGES),
        data=Data(source=tokens.source),
        training=Training(
            total_steps=steps,
            microbatches=local_sync.MICROBATCHES,
            microbatch_size=SEQUENCES,
            sequence_length=local_sync.LENGTH,
            eval_every=EVERY,
            eval_microbatches=EVALS,
        ),
        numerics=Numerics(mode="fp32" if plain else "deterministic"),
        optimizer=local_sync.OPTIMIZER.model_copy(update={"lead": LEAD} if late else {}),
        averaging=Averaging.model_validate(
            # One process has nothing to average: with local sync it is plain torch.
            {"sync": "local" if plain else sync, "codec": codec} | ({"overlap_after": OVERLAP_AFTER} if late else {})
        ),
    )
    return sorted(run_reference(manifest, tokens).evals.items())


def local_curve(tokens: Tokens, steps: int, codec: str) -> Curve:
    """Of the mean of all slow weights."""
    setting = local_sync.Setting("", inner_steps=INNER, codec=codec)
    run = local_sync.Run(
        setting, tokens, replicas=REPLICAS, steps=steps, seed=0, model=MODEL, microbatch_size=SEQUENCES
    )
    found = [(0, held_out(run, tokens))]
    for step in range(steps):
        run.step(step)
        if (step + 1) % EVERY == 0:
            found.append((step + 1, held_out(run, tokens)))
    return found


@torch.no_grad()
def held_out(run: local_sync.Run, tokens: Tokens) -> float:
    """On the tokens that the reference is asked about."""
    replica = run.replicas[0]
    own = [parameter.clone() for parameter in replica.parameters]
    slow = torch.stack([each.outer.slow for each in run.replicas]).mean(0)
    for start, piece in replica.outer._pieces(0, replica.num_elements):
        piece.copy_(slow[start : start + piece.numel()])
    sampler = Sampler(0, tokens.num_tokens, local_sync.LENGTH, SEQUENCES)
    total, count = 0.0, 0
    for index in range(EVALS):
        batch = tokens.microbatch(sampler.eval_positions(index), local_sync.LENGTH)
        total += loss_sum(replica.module(batch[:, :-1]), batch[:, 1:]).item()
        count += batch[:, 1:].numel()
    for parameter, mine in zip(replica.parameters, own, strict=True):
        parameter.copy_(mine)
    return total / count


def curves(tokens: Tokens, steps: int) -> dict[str, Curve]:
    """Of every mode. SWARM and 1F1B sum alike."""
    found: dict[str, Curve] = {}
    said("training exact, fp32")
    found["1F1B"] = found[SWARM] = exact_curve(tokens, steps, codec="fp32")
    said("training local, fp32")
    found["DiLoCo"] = local_curve(tokens, steps, "fp32")
    with coded("int8"):
        for sync in ("exact", "overlap"):
            said(f"training {sync}, small sums, int8 at boundaries")
            found[sync] = exact_curve(tokens, steps, sync=sync)
        said("training local, int8")
        found["local"] = local_curve(tokens, steps, "int8")
    return {mode: found[mode] for mode in MODES}


def steps_to(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """The first crossing, between two evaluations by a straight line; None: there is none."""
    for (before, above), (after, below) in itertools.pairwise(curve):
        if below <= loss:
            return before + (after - before) * (above - loss) / (above - below) if above > below else float(after)
    return None


# ---------------------------------------------------------------- seconds a step


def load_of(share: int = SHARE) -> Load:
    """What a step asks of a member."""
    seconds = LAYERS.flops / PACE
    elements = ROWS * latency.TOKENS * LAYERS.width
    return Load(STAGES, REPLICAS, share * REPLICAS, ROWS * seconds, elements, LAYERS.parameters, seconds / 3)


def swarm_seconds(load: Load, site: Site, sync: str, boundary: str = "int8") -> float:
    """Of a step of a whole swarm; "local" without its outer rounds."""
    codec, rounds = ("int8", 10**9) if sync == "local" else ("small", 1)
    way = Way(boundary, boundary, codec, sync, 1, rounds)
    fleet = Fleet(sync, load, site, replace(way, slots=cost(load, site, way).slots))
    # Steps that overlap come to their pace later.
    return simulated(fleet, steps=4 if sync == "overlap" else 3)[0]


def seconds(load: Load, site: Site) -> dict[str, float]:
    """Of a step of every mode."""
    pipeline = one_f_one_b(load, site)
    fp32, int8 = (all_reduce(load.replicas, BYTES[codec] * load.parameters, site) for codec in ("fp32", "int8"))
    return {
        "exact": swarm_seconds(load, site, "exact"),
        "overlap": swarm_seconds(load, site, "overlap"),
        "local": swarm_seconds(load, site, "local") + int8 / INNER,
        SWARM: swarm_like(load, site) + fp32,
        "1F1B": pipeline + fp32,
        "DiLoCo": pipeline + fp32 / INNER,
    }


def whole_s(mode: str, steps: float, found: dict[str, float]) -> float:
    """Of so many steps. Those of overlap are exact ones at first."""
    exact = min(steps, OVERLAP_AFTER) if mode == "overlap" else 0.0
    return exact * found["exact"] + (steps - exact) * found[mode]


def table(trained: dict[str, Curve], load: Load, lines: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A row for each line and mode, and what they rest on."""
    lowest = {mode: min(value for _, value in curve) for mode, curve in trained.items()}
    losses = {"all": max(lowest.values()), "low": max(lowest[mode] for mode in MODES if mode not in OUTER)}
    steps = {name: {mode: steps_to(curve, loss) for mode, curve in trained.items()} for name, loss in losses.items()}
    for name, loss in losses.items():
        counts = (f"{mode} {'never' if count is None else f'{count:.0f}'}" for mode, count in steps[name].items())
        print(f"held-out loss {loss:.4f} after: {', '.join(counts)}")
    print(f"\nhours, and times faster than {SWARM}, to the first; to the second")
    print(f"{'Mbit/s':>6} {'rtt ms':>6} " + "".join(f"{mode:>28}" for mode in MODES))
    rows: list[dict[str, Any]] = []
    for mbit, rtt_ms in lines:
        line = compared(seconds(load, Site(mbit * 125e3, PACE, rtt_ms / 1e3)), steps)
        rows += [{"mbit": mbit, "rtt_ms": rtt_ms, "mode": mode} | line[mode] for mode in MODES]
        print(f"{mbit:>6g} {rtt_ms:>6g} " + "".join(f"{_cell(line[mode]):>28}" for mode in MODES), flush=True)
    return {"losses": losses, "steps": steps, "rows": rows, "curves": trained}


def compared(found: dict[str, float], steps: dict[str, dict[str, float | None]]) -> dict[str, dict[str, Any]]:
    """Seconds to each loss of each mode on a line, by its seconds a step. None: it does not get there."""
    line: dict[str, dict[str, Any]] = {mode: {"step_s": found[mode]} for mode in MODES}
    for name, of_loss in steps.items():
        whole = {mode: None if count is None else whole_s(mode, count, found) for mode, count in of_loss.items()}
        for mode, taken in whole.items():
            line[mode][f"{name}_s"] = taken
            line[mode][f"{name}_times"] = None if taken is None else (whole[SWARM] or 0.0) / taken
    return line


def _cell(row: dict[str, Any]) -> str:
    cells = ((row[f"{name}_s"], row[f"{name}_times"]) for name in ("all", "low"))
    return "; ".join("never" if taken is None else f"{taken / 3600:.2f} ({times:.2f})" for taken, times in cells)


# ---------------------------------------------------------------- the public meter


def meter(tokens: Tokens, steps: int, *, quick: bool) -> dict[str, Any]:
    """Ours beside the dense run, and what follows for the published seconds."""
    stages, width, layers, vocabulary = 8, 768, 12, 50_257
    site = Site(200 * 125e3, 30e12, 0.05)
    batch, microbatch = 1 << 19, 1 << 13
    parameters = layers * 12 * width**2 + 2 * vocabulary * width
    # The stage with the head takes the longest; all are taken to be as long.
    flops = 6.0 * microbatch * (12 * width**2 + vocabulary * width)
    load = Load(
        stages, 1, (8 if quick else 64) * batch // (64 * microbatch), flops / site.flops_per_s, microbatch * width,
        parameters // stages, 0.01,
    )  # fmt: skip
    static_s = one_f_one_b(load, site)
    dense_s, ours_s = (swarm_seconds(load, site, "exact", codec) for codec in ("bf16", "int8"))
    lost = {}
    for pair in ("bf16,bf16", "int8,int8"):
        said(f"training eight stages, {pair} at boundaries")
        lost[pair] = boundaries.train(pair, tokens, width=64, stages=stages, steps=steps, seed=0)["held_out"]
    # If the reference's seconds hold all but the dense run's bytes, ours saves this share of the rest alone.
    saved = 1 - BYTES["int8"] / BYTES["bf16"]
    found = {
        "static_step_s": static_s,
        "dense_step_s": dense_s,
        "ours_step_s": ours_s,
        "ratio": ours_s / dense_s,
        "held_out": lost,
        "loss_ratio": lost["int8,int8"] / lost["bf16,bf16"],
        "line_bound_s": DENSE_S * ours_s / dense_s,
        "bytes_alone_s": DENSE_S - saved * (DENSE_S - SUBSPACE_S),
        "dense_published_s": DENSE_S,
        "subspace_published_s": SUBSPACE_S,
    }
    print("\nProtocolNanoGPT: 8 stages, 200 Mbit/s, 50 ms, to loss 3.276")
    print(f"published: dense bf16 {DENSE_S:,.0f} s, subspace reference {SUBSPACE_S:,.0f} s")
    print(
        f"measured, virtual time, 124M: 1F1B with bf16 {static_s:.1f} s a step, ours with bf16 {dense_s:.1f} s, with "
        f"int8 {ours_s:.1f} s"
    )
    print(
        f"measured, trained, 8 stages of width 64, {steps} steps: held-out loss with int8 {found['loss_ratio']:.4f} of "
        "bf16's"
    )
    print(f"projected if the dense run is as line-bound as ours with bf16: {found['line_bound_s']:,.0f} s")
    print(f"projected if all that the subspace reference takes is not bytes: {found['bytes_alone_s']:,.0f} s")
    print("not measured: the meter's model, data, machines, and its loss of 3.276")
    return found


def lines_of(text: str) -> list[tuple[int, int]]:
    """Raises argparse.ArgumentTypeError."""
    found = [re.fullmatch(r"(\d+)x(\d+)", each) for each in text.split(",")]
    if not all(found) or any(0 in map(int, each.groups()) for each in found if each):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of Mbit/s and milliseconds; say 200x50,50x200")
    return [(int(each[1]), int(each[2])) for each in found if each]


def said(words: str) -> None:
    """Progress."""
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/time_to_loss.py --json time.json",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--steps", type=int, default=STEPS, help="to train, at least 20  [%(default)s]")
    parser.add_argument("--lines", type=lines_of, metavar="MBITxMS,...", help="these, instead of all nine")
    parser.add_argument("--data", default="stdlib", help="as data.source of a manifest")
    parser.add_argument("--quick", action="store_true", help="one line, two microbatches a replica")
    typed = parser.parse_args()
    if typed.steps < 2 * EVERY or typed.steps % EVERY:
        parser.error(f"--steps must be a multiple of {EVERY}, at least {2 * EVERY}")
    if typed.json and not typed.json.absolute().parent.is_dir():
        parser.error(f"--json {typed.json}: there is no such folder; make it first")
    torch.set_num_threads(1)
    tokens = load_tokens(typed.data)
    trained = curves(tokens, typed.steps)
    lines = typed.lines or (((200, 50),) if typed.quick else LINES)
    found = table(trained, load_of(share=2) if typed.quick else load_of(), lines)
    found["meter"] = meter(tokens, typed.steps // 2, quick=typed.quick)
    if typed.json:
        typed.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
