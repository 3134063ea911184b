"""Which sync, codecs, microbatch, slots, and of a fleet which stages fit: all are priced, and the cheapest taken. Pure.

Cheapest is the time to one loss. What a way harms the loss is measured (docs/averaging.md, docs/numerics.md,
docs/local-sync.md), and steps make up for it: loss falls with the tokens to the power of -0.095 (arXiv:2001.08361), so
a loss that is r times as high takes r^(1/0.095) times the steps. Within 10 % the most faithful way is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, compress, islice, product

from swarmnet.config.fleet import Members
from swarmnet.config.plug_in import split
from swarmnet.errors import UsageError
from swarmnet.manifest.codec_names import INTEGERS
from swarmnet.manifest.implied import OVERLAP_AFTER
from swarmnet.manifest.schema import Cut, StageSpec, Training
from swarmnet.plan.cost import BYTES, CODING_NS, Cost, LayerTimes, Way, cost
from swarmnet.plan.members import Counts, Fits, Situation, situated

SUMS = (("exact", "small", 1.0), ("overlap", "small", 1.0), ("local", "int8", 1.03))
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
"""Memory is planned for so many proposals, and for all that are nearly as fast as the best; so many are shown."""

_STAGES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)


@dataclass(frozen=True, slots=True)
class Priced:
    """One way to run, with members in their places, and what it costs."""

    way: Way
    situation: Situation
    cost: Cost
    fits: Fits
    """() if memory is unknown."""
    training: Training
    cut: Cut
    stages_per_peer: int
    more_steps: float
    """For the loss that exact sums and fp32 boundaries reach."""
    faithful: int
    """Its rank among the configurations, the most accurate first."""
    mode: str
    """Of `numerics`."""

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
        """Proposals with equal ones differ in details."""
        return self.cut.stages, self.stages_per_peer, self.way.sync, self.way.codec

    def slots_of(self, kind: int) -> int:
        """Slots of machines of that kind: as many as are enough, and fit at every position in the pipeline where it
        is."""
        places = zip(self.fits, self.situation.counts, strict=False)
        return min([self.cost.slots, *(fits[kind].slots for fits, counts in places if counts[kind])])


class NothingFits(UsageError):
    """Machines that cannot serve the run."""


Look = Callable[[Priced], Fits]
Placed = tuple[Way, Situation, Cost]
Placer = Callable[[Way, Cut, int, Training], Placed | None]


def search(
    spec: StageSpec,
    said: Mapping[str, object],
    members: Members,
    look: Look | None = None,
    times: LayerTimes | None = None,
    counts: Counts | None = None,
) -> tuple[Priced, tuple[Priced, ...]]:
    """(the best way, what to compare it with: the best few, and the best one under other boundary codecs).

    Raises UsageError if something that was said has no price, NothingFits if nothing fits.

    Args:
        spec: of any stage.
        said: fields that are chosen already, by dotted names; every way has those.
        look: plans memory: nothing is proposed that does not fit. None: memory is unknown.
        times: measured, instead of FLOPs.
        counts: where members are, with the stages of `spec`; else stages and their places are chosen, too.
    """

    def placed_on(way: Way, cut: Cut, held: int, training: Training, fits: Fits = ()) -> Placed | None:
        """Members at positions that fit them, with as many slots as keep devices busy, and fit. None: a position gets
        none."""
        changed = spec.model_copy(update={"cut": cut, "training": training, "stage": 0})
        found = situated(changed, members, way, stages_per_peer=held, times=times, fits=fits, counts=counts)
        if found is None:
            return None
        used = (compress(row, numbers) for row, numbers in zip(fits, found.counts, strict=False))
        fit = [each.slots for each in chain.from_iterable(used)]
        way = replace(way, slots=min([cost(found.load, found.site, replace(way, slots=1)).slots, *fit]))
        return way, found, cost(found.load, found.site, way)

    shapes = [(spec.cut, 1)] if counts is not None else list(_shapes(spec, said, members, times))
    ways = sorted(_ways(spec, said, members, shapes, placed_on), key=lambda each: each.seconds)
    if not ways:
        raise NothingFits(
            f"{members.count} machines: fewer than the stages that are wanted, or too small for any of them"
        )
    if look is None:
        fitting = ways
    else:
        looked: dict[tuple[object, ...], Fits] = {}
        fitting = []
        for each in ways:
            near = bool(fitting) and each.seconds <= _EQUAL * fitting[0].seconds
            if len({one.kind for one in fitting}) >= FEW and not near:
                break
            key = (*each.kind, each.training.microbatch_size)
            if key not in looked:
                looked[key] = look(each)
            if (placed := placed_on(each.way, each.cut, each.stages_per_peer, each.training, looked[key])) is not None:
                way, situation, price = placed
                placed_each = replace(each, way=way, situation=situation, cost=price, fits=looked[key])
                fitting = sorted([*fitting, placed_each], key=lambda one: one.seconds)
        if not fitting:
            raise NothingFits(_unfit(next(iter(looked.values()))))
    best = _best(fitting)
    few: dict[tuple[object, ...], Priced] = {}
    for each in (best, *fitting):
        few.setdefault(each.kind, each)
    others = [each for each in fitting if (each.kind, each.training) == (best.kind, best.training)]
    return best, tuple(islice(dict.fromkeys([*few.values(), *others]), FEW))


def _unfit(fits: Fits) -> str:
    """Why machines cannot hold the stages of the fastest way."""
    none = next((place for place, row in enumerate(fits) if not any(fit.slots for fit in row)), None)
    if none is None:
        return "no stages fit these machines: too few of them hold some stage: more machines, or fewer --stages"
    least = min(fit.need for fit in fits[none])
    return (
        f"no stages fit these machines: the fastest way takes {least / 2**30:.3g} GiB of a device for stage {none}, "
        "which fits no machine; more memory, more --stages, or a smaller model or microbatch"
    )


def _best(ways: list[Priced]) -> Priced:
    """The most faithful that is as good as the best."""
    least = min(priced.seconds for priced in ways)
    return min(
        (priced for priced in ways if priced.seconds <= _EQUAL * least),
        key=lambda each: (each.faithful, -each.training.microbatch_size, each.seconds),
    )


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
    spec: StageSpec, said: Mapping[str, object], members: Members, shapes: list[tuple[Cut, int]], placer: Placer
) -> Iterator[Priced]:
    """All combinations. Raises UsageError for a codec without a price."""
    given = said.get("wire.activations"), said.get("wire.gradients")
    boundaries = [each for each in BOUNDARIES if given[0] in (None, each[0]) and given[1] in (None, each[1])]
    if min(kind.bytes_per_s for kind in members.machines) >= LOOPBACK_BYTES_PER_S:
        boundaries.reverse()
    boundaries = boundaries or [(str(given[0] or "int8"), str(given[1] or "int8"), 1.0)]
    both = product(_sums(spec, said), boundaries)
    for faithful, ((sync, codec, harm), (activations, gradients, more_harm)) in enumerate(both):
        for name, known in ((codec, CODING_NS.keys()), (activations, BYTES.keys()), (gradients, BYTES.keys())):
            if split(name)[0] not in known:
                raise UsageError(f'cannot tell what "{name}" costs: take another codec, or no --mbit or --fleet')
        mode = str(said.get("numerics.mode", "fp32" if sync == "local" else "deterministic"))
        way = Way(activations, gradients, codec, sync, 1, spec.averaging.inner_steps if sync == "local" else 1)
        more = (harm * more_harm) ** (1 / _TOKENS_EXPONENT)
        for (cut, held), training in product(shapes, _trainings(spec.training, said)):
            if (placed := placer(way, cut, held, training)) is not None:
                yield Priced(*placed, (), training, cut, held, more, faithful, mode)


def _trainings(training: Training, said: Mapping[str, object]) -> Iterator[Training]:
    """The step's sequences in microbatches as large as now, or smaller: of larger ones the memory is not known."""
    yield training
    size, rows = training.microbatch_size, training.microbatch_size * training.microbatches
    if said.keys() & {"training.microbatch_size", "training.microbatches"}:
        return
    while size % 2 == 0 and size // 2 * training.sequence_length >= _LEAST_TOKENS:
        size //= 2
        yield training.model_copy(update={"microbatch_size": size, "microbatches": rows // size})
