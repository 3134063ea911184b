"""How `swarmnet plan` reports: tables, or JSON. What a step costs and who serves what, `swarmnet init` shows, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from swarmnet.config.fleet import Members
from swarmnet.manifest.schema import StageSpec
from swarmnet.peer.memory_fit import PlanFit, listed
from swarmnet.plan.choice import Priced
from swarmnet.plan.cost import LayerTimes, hiding_bytes_per_s, limits, rule_bubble, volumes
from swarmnet.plan.members import MachineFit
from swarmnet.plan.memory import StageMemory, shown
from swarmnet.telemetry.text import counted

_DAY_S = 86_400

_HEAD = ("stage", "ranks", "weights", "grads", "sums", "optimizer", "each", "flying", "temporary", "peak", "host")

_TERMS = {
    "compute": "devices work",
    "bubble": "they wait for microbatches: the pipeline fills and drains, slots are few",
    "boundary": "they wait for activations and gradients on the line",
    "averaging": "they wait for the aggregate of all replicas",
    "barrier": "they wait for messages between the aggregate and the next step",
}


def aligned(rows: Sequence[Sequence[str]], *, right: bool = True) -> list[str]:
    """Columns, to the right or to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    side = str.rjust if right else str.ljust
    return ["  ".join(map(side, row, widths)).rstrip() for row in rows]


def number(value: float) -> str:
    """In three digits, or whole."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def memory_table(plans: Sequence[StageMemory]) -> list[str]:
    """Lines of at most 100 columns, one per stage: of its rank that holds the most."""
    rows: list[Sequence[str]] = [_HEAD]
    for plan in plans:
        rank, in_flight = plan.rank, plan.in_flight
        sizes = [rank.parameters, rank.gradients, rank.sums, rank.optimizer, rank.held]
        most = [rank.temporary(in_flight), rank.peak(in_flight), plan.host_total]
        rows.append((str(plan.stage), str(plan.ranks), *map(shown, sizes), str(in_flight), *map(shown, most)))
    return aligned(rows)


def fit_record(found: PlanFit) -> dict[str, Any]:
    """Whether a peer's stages fit, as JSON; sizes in bytes."""
    names = ("fits", "need", "room", "missing", "host_need", "host_room", "host_missing")
    return {name: getattr(found, name) for name in names}


def memory_record(found: PlanFit) -> dict[str, Any]:
    """The one stage of a peer as JSON; sizes in bytes."""
    (plan,) = found.plans
    return {
        "stage": plan.stage,
        "layers": [plan.layers.start, plan.layers.stop],
        "in_flight": plan.in_flight,
        **fit_record(found),
        "ranks": plan.ranks,
        "rank": {**asdict(plan.rank), "state": plan.rank.state, "peak": plan.rank.peak(plan.in_flight)},
        "host": {**plan.host, "total": plan.host_total},
    }


# ------------------------------------------------------------ a step


def step_record(priced: Priced, spec: StageSpec, members: Members, times: LayerTimes | None) -> dict[str, Any]:
    """A step as JSON: seconds, bytes. spec: of any stage."""
    found, way, cost, training = priced.situation, priced.way, priced.cost, priced.training
    load, tokens = found.load, training.microbatches * training.microbatch_size * training.sequence_length
    share, layers = load.microbatches / load.replicas, -(-spec.model.num_layers // load.stages)
    return {
        "members": members.model_dump(mode="json"),
        **asdict(found),
        "stages_per_peer": priced.stages_per_peer,
        "measured": times is not None,
        "way": asdict(way),
        "step_s": cost.step_s,
        "terms_s": {"compute": cost.compute_s, **cost.waits},
        "utilisation": cost.utilisation,
        "tokens_per_day": tokens * _DAY_S / cost.step_s,
        "slots_enough": cost.slots,
        "with_twice_s": limits(load, found.site, way),
        "hiding_mbit": hiding_bytes_per_s(load, way) * 8 / 1e6,
        "rule_bubble": {str(each): rule_bubble(load.stages, share, each) for each in (1, 2)},
        "sent_bytes": {"boundary": cost.boundary_bytes, "averaging": cost.averaging_bytes},
        "techniques_bytes": volumes(load, layers, spec.averaging.inner_steps),
    }


def step_lines(found: dict[str, Any], words: str) -> Iterator[str]:
    """The same for a terminal, at most 100 columns. words: what machines there are."""
    step_s, faster, slots, enough = found["step_s"], found["with_twice_s"], found["way"]["slots"], found["slots_enough"]
    one, two = found["rule_bubble"].values()
    yield f"a step on {words}: {number(step_s)} s, {_count(found['tokens_per_day'])} tokens a day"
    for name, seconds in found["terms_s"].items():
        if round(seconds, 4):
            yield f"  {name:<9} {number(seconds):>7} s {seconds / step_s:>5.0%}  {_TERMS[name]}"
    yield ""
    by = "measured layer times" if found["measured"] else "FLOPs"
    yield f"a microbatch takes {number(found['load']['microbatch_s'])} s in the slowest stage, by {by}"
    yield (
        f"what limits it most: the {min(faster, key=faster.__getitem__)}; twice the line {number(faster['line'])} s, "
        f"twice the devices {number(faster['devices'])} s, half the latency {number(faster['latency'])} s"
    )
    if found["hiding_mbit"]:
        yield f"the line this stage needs, so that boundaries hide behind compute: {found['hiding_mbit']:,.3g} Mbit/s"
    more = f"as many as fit; {enough} would keep devices busier: {number(faster['memory'])} s"
    yield f"slots: {slots}, {more if slots < enough else 'enough'}"
    yield (
        f"a pipeline of forwards and backwards alone would wait {one:.0%} of a step, (P-1)/(M+P-1), "
        f"or {two:.0%} with two stages a peer"
    )
    yield ""
    sent = {name: shown(round(size)) for name, size in found["sent_bytes"].items()}
    yield f"a member sends in a step: {sent['boundary']} over boundaries, {sent['averaging']} for sums"
    yield f"what each of {found['load']['replicas']} would send that shared the stage by one technique, in fp32:"
    yield from aligned([(f"  {name}", shown(round(size))) for name, size in found["techniques_bytes"].items()])


def served(priced: Priced, place: int) -> str:
    """The stages of a peer there, as `--stage` takes them."""
    return listed(range(place, priced.cut.stages, len(priced.situation.counts)))


def served_lines(priced: Priced, members: Members) -> Iterator[str]:
    """Which machines serve what, with how much of their memory; and what those need that serve nothing."""
    for place, counts in enumerate(priced.situation.counts):
        parts = []
        for n, fit, kind in zip(counts, priced.fits[place], members.machines, strict=True):
            if n:
                host = f" and {_of(fit.host_need, kind.host_bytes)} of the host" if fit.host_need else ""
                mesh = f", {kind.gpus} GPUs by {fit.shard if fit.shard != 'none' else 'tensor'}" * (kind.gpus > 1)
                memory = f"{_of(fit.need, kind.device_bytes)}{host}"
                parts.append(f"{n} x {kind.name} (up to {counted(fit.slots, 'slot')} in {memory}{mesh})")
        seconds = priced.situation.place_s[place]
        yield f"stage {served(priced, place)}: {', '.join(parts)}; {number(seconds)} s a microbatch"
    for place, kind in enumerate(members.machines):
        if idle := kind.count - sum(counts[place] for counts in priced.situation.counts):
            yield f"{idle} x {kind.name} do nothing: {_lacking([row[place] for row in priced.fits], kind.device_bytes)}"


def _lacking(fits: Sequence[MachineFit], room: int | None) -> str:
    """What machines would need that no stage fits."""
    needs = [fit.need for fit in fits if fit.need]
    if room is None or not needs or min(needs) <= room:
        return "no stage fits them"
    less = 'more --stages, smaller microbatches, optimizer.state = "8bit"'
    return f"no stage fits them; the smallest needs {_of(min(needs), room)}; what takes less: {less}"


def _of(need: int, room: int | None) -> str:
    return shown(need) if room is None else f"{shown(need)} of {shown(room)}"


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
