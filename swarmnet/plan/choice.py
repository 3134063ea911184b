"""Which sync, codecs, microbatch, slots, and of a fleet which stages fit: all are priced, and the cheapest taken. Pure.

Cheapest is the time to one loss. What a way harms the loss is measured (docs/codecs.md, docs/numerics.md,
docs/local-sync.md), and steps make up for it: loss falls with the tokens to the power of -0.095 (arXiv:2001.08361), so
a loss that is r times as high takes r^(1/0.095) times the steps. Within 10 % the most faithful way is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swarmnet.config.fleet import Members
from swarmnet.config.plug_in import split
from swarmnet.errors import UsageError
from swarmnet.manifest.codec_names import INTEGERS
from swarmnet.manifest.implied import OVERLAP_AFTER
from swarmnet.manifest.schema import Cut, StageSpec, Training
from swarmnet.plan.cost import BYTES, CODING_NS, Cost, LayerTimes, Way, cost, works
from swarmnet.plan.members import Counts, Situation, situated

SUMS = (("exact", "int64", 1.0), ("exact", "small", 1.0), ("overlap", "small", 1.008), ("local", "int8", 1.03))
"""(averaging.sync, averaging.codec, held-out loss over that of exact sums)."""

BOUNDARIES = (("int8", "int8", 1.0), ("int8", "nf4", 1.027), ("fp32", "fp32", 1.0))
"""(wire.activations, wire.gradients, held-out loss over fp32's at seven boundaries of width 256)."""

LOOPBACK_BYTES_PER_S = 1e9
"""On a line like this nothing is gained by rounding what crosses a boundary."""

_LEAST_TOKENS = 1024
"""Of a microbatch: with fewer a device would wait for the launch of its kernels, which is not in the price."""

_TOKENS_EXPONENT = 0.095
_EQUAL = 1.1
"""Times that differ by less are equal: the formulas know no better."""


FEW = 5
"""Proposals of a search that are shown."""

_STAGES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)


@dataclass(frozen=True, slots=True)
class MachineFit:
    """How a machine of one kind holds the stages of one place."""

    slots: int
    """That fit; 0: not even one."""
    need: int = 0
    """Bytes of each device, with so many, or with one."""
    host_need: int = 0
    """Bytes beside GPUs."""
    shard: str = "none"
    """How its GPUs share the stages."""


@dataclass(frozen=True, slots=True)
class Priced:
    """One way to run, and what it costs."""

    way: Way
    training: Training
    cut: Cut
    stages_per_peer: int
    situation: Situation
    cost: Cost
    more_steps: float
    """For the loss that exact sums and fp32 boundaries reach."""
    faithful: int
    """Its place among ways from the most faithful on."""
    mode: str
    """Of `numerics`."""
    fits: tuple[tuple[MachineFit, ...], ...] = ()
    """For each place, of each kind; () if nobody looked."""

    @property
    def seconds(self) -> float:
        """Of a step, and of its share of the steps that make up for what it harms."""
        return self.cost.step_s * self.more_steps

    @property
    def fields(self) -> dict[str, object]:
        """Of a manifest, by dotted names."""
        return {
            "numerics.mode": self.mode,
            "averaging.sync": self.way.sync,
            "averaging.codec": self.way.codec,
            "wire.activations": self.way.activations,
            "wire.gradients": self.way.gradients,
            "training.microbatch_size": self.training.microbatch_size,
            "training.microbatches": self.training.microbatches,
            "cut.stages": self.cut.stages,
            "cut.layers": self.cut.layers if isinstance(self.cut.layers, str) else list(self.cut.layers),
        }

    @property
    def kind(self) -> tuple[object, ...]:
        """All but what crosses a boundary."""
        return self.cut.stages, self.stages_per_peer, self.training.microbatch_size, self.way.sync, self.way.codec


Look = Callable[[Priced], tuple[tuple[MachineFit, ...], ...]]
"""How each kind of machine holds the stages of each place."""


def choose(
    spec: StageSpec, said: Mapping[str, object], members: Members, counts: Counts, times: LayerTimes | None = None
) -> tuple[Priced, tuple[Priced, ...]]:
    """(what fits members best that are in their places, all ways compared): the best of each kind of sum, and the
    chosen under other boundary codecs.

    spec: of any stage. said: fields that somebody has chosen, by dotted names; every way has those. Raises UsageError
    if one of them has no price.
    """
    found = list(_ways(spec, said, members, times, shapes=[(spec.cut, 1)], counts=counts))
    best = _best(found)
    kinds = [
        _best([each for each in found if (each.way.sync, each.way.codec) == kind])
        for kind in dict.fromkeys((each.way.sync, each.way.codec) for each in found)
    ]
    others = [each for each in found if each.kind == best.kind]
    return best, tuple(dict.fromkeys([*kinds, *others]))


def search(
    spec: StageSpec, said: Mapping[str, object], members: Members, look: Look, times: LayerTimes | None = None
) -> tuple[Priced, tuple[Priced, ...]]:
    """(the best way for a fleet, the best few): stages, their places, microbatch, sync and codecs; all fit in memory.

    As `choose`; UsageError, too, if nothing fits.
    """
    shapes = list(_shapes(spec, said, members, times))
    found = sorted(_ways(spec, said, members, times, shapes=shapes), key=lambda each: each.seconds)
    if not found:
        raise UsageError(
            f"{members.count} machines: fewer than the stages that are wanted, or too small for any of them"
        )
    looked: dict[tuple[object, ...], tuple[tuple[MachineFit, ...], ...]] = {}
    fitting: list[Priced] = []
    for each in found:
        near = bool(fitting) and each.seconds <= _EQUAL * fitting[0].seconds
        if len({one.kind for one in fitting}) >= FEW and not near:
            break
        if each.kind not in looked:
            looked[each.kind] = look(each)
        if (held := _held(spec, members, each, looked[each.kind], times)) is not None:
            fitting.append(held)
            fitting.sort(key=lambda one: one.seconds)
    if not fitting:
        first = next(iter(looked.values()))
        least = min(fit.need for place in first for fit in place)
        raise UsageError(
            f"no stages fit these machines: the fastest way takes {least / 2**30:.3g} GiB of a device; more machines, "
            "more memory, or a smaller model or microbatch"
        )
    best = _best(fitting)
    few: dict[tuple[object, ...], Priced] = {}
    for each in (best, *fitting):
        few.setdefault(each.kind, each)
    return best, tuple(few.values())[:FEW]


def _held(
    spec: StageSpec,
    members: Members,
    priced: Priced,
    fits: tuple[tuple[MachineFit, ...], ...],
    times: LayerTimes | None,
) -> Priced | None:
    """With machines only where they fit, and as many slots; None if some place has nobody then."""
    changed = _changed(spec, priced.cut, priced.training)
    able = [[bool(fit.slots) for fit in place] for place in fits]
    found = situated(changed, members, priced.way, stages_per_peer=priced.stages_per_peer, times=times, fits=able)
    if found is None:
        return None
    fed = replace(priced.way, slots=cost(found.load, found.site, priced.way).slots)
    slots = [
        fit.slots
        for place, used in zip(fits, found.counts, strict=True)
        for fit, n in zip(place, used, strict=True)
        if n
    ]
    way = replace(fed, slots=min(fed.slots, *slots))
    return replace(priced, way=way, situation=found, cost=cost(found.load, found.site, way), fits=fits)


def _best(ways: list[Priced]) -> Priced:
    """The most faithful that is as good as the best."""
    least = min(priced.seconds for priced in ways)
    return min(
        (priced for priced in ways if priced.seconds <= _EQUAL * least),
        key=lambda each: (each.faithful, -each.training.microbatch_size, each.seconds),
    )


def _changed(spec: StageSpec, cut: Cut, training: Training) -> StageSpec:
    return spec.model_copy(update={"cut": cut, "training": training, "stage": 0})


def _shapes(
    spec: StageSpec, said: Mapping[str, object], members: Members, times: LayerTimes | None
) -> Iterator[tuple[Cut, int]]:
    """(cut, stages of each peer)."""
    layers = spec.model.num_layers
    wanted = [spec.cut.stages] if said.keys() & {"cut.stages", "cut.layers"} else [n for n in _STAGES if n <= layers]
    for stages in wanted:
        cut = spec.cut if stages == spec.cut.stages else Cut(stages=stages)
        if times is not None and "cut.layers" not in said:
            cut = Cut(stages=stages, layers=times.cut(layers, stages))
        for held in (1, 2):
            if stages % held == 0 and (held == 1 or stages > 2) and stages // held <= members.count:
                yield cut, held


def _could_hold(spec: StageSpec, members: Members, cut: Cut, held: int, sync: str, wide: int) -> bool:
    """May any machine hold the stages of any place? By what is there always: weights, gradients, sums and moments."""
    versions = 2 if sync == "overlap" else 1
    moments = 8 if spec.optimizer.state == "fp32" else 2
    parameters = held * min(each.parameters for each in works(spec.model_copy(update={"cut": cut})))
    least = parameters * (4 * versions + wide * versions + moments)
    return any(kind.room is None or least <= kind.room * kind.gpus for kind in members.machines)


def _sums(spec: StageSpec, said: Mapping[str, object]) -> list[tuple[str, str, float]]:
    """The kinds of sums that `said` allows, and that a run as long as this one gains from."""
    steps, sync = spec.training.total_steps, said.get("averaging.sync")
    # Overlap begins late, and so does the momentum of local training.
    least = {"exact": 0, "overlap": 2 * OVERLAP_AFTER, "local": 2 * spec.averaging.outer_warmup_steps}
    codec, mode = said.get("averaging.codec"), said.get("numerics.mode")
    # Aggregates of integers are sums.
    if said.get("averaging.reducer", "sum") != "sum":
        mode = mode or "fp32"
    # Gossip partners send weights, which int8 would spoil.
    if sync == "local" and said.get("averaging.partners") == "pairs":
        codec = codec or "fp16"
    found = [
        each
        for each in SUMS
        if (sync == each[0] or (sync is None and steps > least[each[0]]))
        and codec in (None, each[1])
        and mode in (None, *(("deterministic", "fast") if each[1] in INTEGERS else ("fp32",)))
    ]
    # A combination that nothing recommends is priced as it is.
    if not found:
        found = [(str(sync or "exact"), str(codec or ("int8" if sync == "local" else "small")), 1.0)]
    return found


def _ways(
    spec: StageSpec,
    said: Mapping[str, object],
    members: Members,
    times: LayerTimes | None,
    *,
    shapes: list[tuple[Cut, int]],
    counts: Counts | None = None,
) -> Iterator[Priced]:
    """All combinations; counts: where everybody is, if that is known."""
    places: dict[tuple[Any, ...], Situation | None] = {}
    given = said.get("wire.activations"), said.get("wire.gradients")
    boundaries = [each for each in BOUNDARIES if given[0] in (None, each[0]) and given[1] in (None, each[1])]
    if min(kind.bytes_per_s for kind in members.machines) >= LOOPBACK_BYTES_PER_S:
        boundaries.reverse()
    boundaries = boundaries or [(str(given[0] or "int8"), str(given[1] or "int8"), 1.0)]
    sums = _sums(spec, said)
    for rank, (sync, codec, harm) in enumerate(sums):
        inner_steps = spec.averaging.inner_steps if sync == "local" else 1
        mode = str(said.get("numerics.mode", "fp32" if sync == "local" else "deterministic"))
        for more, (activations, gradients, more_harm) in enumerate(boundaries):
            way = Way(activations, gradients, codec, sync, 1, inner_steps)
            for name, known in ((codec, CODING_NS.keys()), (activations, BYTES.keys()), (gradients, BYTES.keys())):
                if split(name)[0] not in known:
                    raise UsageError(
                        f'cannot tell what "{name}" costs: leave the codec to --mbit or --fleet, or leave that out'
                    )
            for cut, held in shapes:
                wide = 8 if codec in INTEGERS else 4
                if counts is None and not _could_hold(spec, members, cut, held, sync, wide):
                    continue
                for training in _trainings(spec.training, said):
                    key = (cut, held, training, activations, gradients)
                    if key not in places:
                        changed = _changed(spec, cut, training)
                        places[key] = situated(changed, members, way, stages_per_peer=held, times=times, counts=counts)
                    if (found := places[key]) is None:
                        continue
                    load, site = found.load, found.site
                    fed = replace(way, slots=cost(load, site, way).slots)
                    yield Priced(
                        fed,
                        training,
                        cut,
                        held,
                        found,
                        cost(load, site, fed),
                        (harm * more_harm) ** (1 / _TOKENS_EXPONENT),
                        rank * len(boundaries) + more,
                        mode,
                    )


def _trainings(training: Training, said: Mapping[str, object]) -> Iterator[Training]:
    """The step's sequences in microbatches as large as now, or smaller: of larger ones the memory is not known."""
    yield training
    size, rows = training.microbatch_size, training.microbatch_size * training.microbatches
    if said.keys() & {"training.microbatch_size", "training.microbatches"}:
        return
    while size % 2 == 0 and size // 2 * training.sequence_length >= _LEAST_TOKENS:
        size //= 2
        yield training.model_copy(update={"microbatch_size": size, "microbatches": rows // size})
