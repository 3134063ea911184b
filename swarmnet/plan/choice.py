"""Which sync, codecs, microbatch and slots fit a line: every sensible way is priced, and the cheapest one taken. Pure.

Cheapest is the time to one loss. What a way harms the loss is measured (docs/codecs.md, docs/numerics.md,
docs/local-sync.md), and steps make up for it: loss falls with the tokens to the power of -0.095 (arXiv:2001.08361), so
a loss that is r times as high takes r^(1/0.095) times the steps. Within 10 % the most faithful way is taken, which is
the one listed first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from swarmnet.errors import UsageError
from swarmnet.manifest.codec_names import EXACT
from swarmnet.manifest.implied import OVERLAP_AFTER
from swarmnet.manifest.schema import StageSpec, Training
from swarmnet.plan.cost import BYTES, CODING_NS, Cost, Load, Site, Way, cost, load_of

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


@dataclass(frozen=True, slots=True)
class Priced:
    """One way to run, and what it costs."""

    way: Way
    microbatch_size: int
    microbatches: int
    cost: Cost
    more_steps: float
    """For the loss that exact sums and fp32 boundaries reach."""

    @property
    def seconds(self) -> float:
        """Of a step, and of its share of the steps that make up for what it harms."""
        return self.cost.step_s * self.more_steps

    @property
    def fields(self) -> dict[str, object]:
        """Of a manifest, by dotted names."""
        exact = self.way.codec in EXACT
        return {
            "numerics.mode": "deterministic" if exact else "fp32",
            "averaging.sync": self.way.sync,
            "averaging.codec": self.way.codec,
            "wire.activations": self.way.activations,
            "wire.gradients": self.way.gradients,
            "training.microbatch_size": self.microbatch_size,
            "training.microbatches": self.microbatches,
        }


def choose(
    spec: StageSpec, said: Mapping[str, object], site: Site, *, replicas: int
) -> tuple[Priced, tuple[Priced, ...]]:
    """(what fits best, all ways compared): the best of each kind of sum, and the chosen under other boundary codecs.

    spec: of any stage. said: fields that somebody has chosen, by dotted names; every way has those. Raises UsageError
    if one of them has no price.
    """
    kinds = [tuple(_ways(spec, said, site, replicas, kind)) for kind in _sums(spec, said)]
    best = _best([priced for kind in kinds for priced in kind])
    others = [each for kind in kinds for each in kind if _alike(each, best)]
    return best, tuple(dict.fromkeys([*map(_best, kinds), *others]))


def _best(ways: list[Priced] | tuple[Priced, ...]) -> Priced:
    """The first that is as good as the best."""
    least = min(priced.seconds for priced in ways)
    return next(priced for priced in ways if priced.seconds <= _EQUAL * least)


def _alike(one: Priced, other: Priced) -> bool:
    """Do they differ in what crosses a boundary alone?"""
    kinds = [(each.way.sync, each.way.codec, each.microbatch_size) for each in (one, other)]
    return kinds[0] == kinds[1]


def _sums(spec: StageSpec, said: Mapping[str, object]) -> list[tuple[str, str, float]]:
    """The kinds of sums that `said` allows, and that a run as long as this one gains from."""
    steps, sync = spec.training.total_steps, said.get("averaging.sync")
    # Overlap begins late, and so does the momentum of local training.
    least = {"exact": 0, "overlap": 2 * OVERLAP_AFTER, "local": 2 * spec.averaging.outer_warmup_steps}
    codec, mode = said.get("averaging.codec"), said.get("numerics.mode")
    # No rule but the sum goes with exact sums, and partners send weights, which int8 would spoil.
    if said.get("averaging.reducer", "sum") != "sum":
        mode = mode or "fp32"
    if sync == "local" and said.get("averaging.partners") == "pairs":
        codec = codec or "fp16"
    found = [
        each
        for each in SUMS
        if (sync == each[0] or (sync is None and steps > least[each[0]]))
        and codec in (None, each[1])
        and mode in (None, "deterministic" if each[1] in EXACT else "fp32")
    ]
    # A combination that nothing recommends is priced as it is.
    if not found:
        found = [(str(sync or "exact"), str(codec or "int8"), 1.0)]
    return found


def _ways(
    spec: StageSpec, said: Mapping[str, object], site: Site, replicas: int, sums: tuple[str, str, float]
) -> Iterator[Priced]:
    sync, codec, harm = sums
    inner_steps = spec.averaging.inner_steps if sync == "local" else 1
    given = said.get("wire.activations"), said.get("wire.gradients")
    boundaries = [each for each in BOUNDARIES if given[0] in (None, each[0]) and given[1] in (None, each[1])]
    if site.bytes_per_s >= LOOPBACK_BYTES_PER_S:
        boundaries.reverse()
    for activations, gradients, more_harm in boundaries or [(str(given[0] or "int8"), str(given[1] or "int8"), 1.0)]:
        for name, known in ((codec, CODING_NS.keys()), (activations, BYTES.keys()), (gradients, BYTES.keys())):
            if name not in known:
                raise UsageError(f'--mbit cannot tell what "{name}" costs: leave the codec to it, or leave --mbit out')
        for training in _trainings(spec.training, said):
            load = load_of(spec.model_copy(update={"training": training}), site, replicas=replicas)
            yield _priced(
                load,
                site,
                Way(activations, gradients, codec, sync, 1, inner_steps),
                training,
                (harm * more_harm) ** (1 / _TOKENS_EXPONENT),
            )


def _priced(load: Load, site: Site, way: Way, training: Training, more_steps: float) -> Priced:
    fed = replace(way, slots=cost(load, site, way).slots)
    return Priced(fed, training.microbatch_size, training.microbatches, cost(load, site, fed), more_steps)


def _trainings(training: Training, said: Mapping[str, object]) -> Iterator[Training]:
    """The step's sequences in microbatches as large as now, or smaller: of larger ones the memory is not known."""
    yield training
    size, rows = training.microbatch_size, training.microbatch_size * training.microbatches
    if said.keys() & {"training.microbatch_size", "training.microbatches"}:
        return
    while size % 2 == 0 and size // 2 * training.sequence_length >= _LEAST_TOKENS:
        size //= 2
        yield training.model_copy(update={"microbatch_size": size, "microbatches": rows // size})
