"""Seconds of a step, where they go, and what limits them, for `swarmnet plan`. Knows no machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmnet.cli.line import Lent
from swarmnet.config.plug_in import split
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import StageSpec, Wire
from swarmnet.plan.cost import (
    BYTES,
    CODING_NS,
    Cost,
    LayerTimes,
    Load,
    Way,
    cost,
    hiding_bytes_per_s,
    limits,
    rule_bubble,
    volumes,
)
from swarmnet.plan.members import Situation, situated
from swarmnet.plan.memory import shown

_DAY_S = 86_400

_TERMS = (
    ("compute", "devices work"),
    ("bubble", "they wait for microbatches: the pipeline fills and drains, slots are few"),
    ("boundary", "they wait for activations and gradients on the line"),
    ("averaging", "they wait for the sum of all replicas"),
    ("barrier", "messages between the sum and the next step"),
    ("hidden", "of these, behind the next steps' compute"),
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of a run whose members are in their places, as the slowest place has it."""

    lent: Lent
    found: Situation
    way: Way
    cost: Cost
    tokens: int
    """Of a step."""
    volumes: dict[str, float]
    """What techniques would send."""
    times: LayerTimes | None

    @classmethod
    def of(
        cls,
        spec: StageSpec,
        wire: Wire,
        lent: Lent,
        *,
        slots: int,
        times: LayerTimes | None = None,
        fits: Sequence[Sequence[bool]] | None = None,
    ) -> StepTime | None:
        """None: some stage gets no machine.

        Args:
            spec: of any stage.
            slots: 0 for as many as are enough.
            times: measured.
            fits: whether each kind of machine holds each stage.

        Raises UsageError for a codec of unknown size.
        """
        averaging, training = spec.averaging, spec.training
        for where, codec, known in (
            ("averaging.codec", averaging.codec, CODING_NS.keys()),
            ("wire.activations", wire.activations, BYTES.keys()),
            ("wire.gradients", wire.gradients, BYTES.keys()),
        ):
            if split(codec)[0] not in known:
                raise UsageError(f'cannot tell what {where} = "{codec}" costs: leave --mbit and --fleet out')
        inner = averaging.inner_steps if averaging.sync == "local" else 1

        def way(slots: int) -> Way:
            return Way(wire.activations, wire.gradients, averaging.codec, averaging.sync, slots, inner)

        counts = lent.counts(spec.cut.stages)
        found = situated(spec, lent.members, way(1), times=times, fits=fits, counts=counts)
        if found is None:
            return None
        load, site = found.load, found.site
        used = way(slots or cost(load, site, way(1)).slots)
        tokens = training.microbatches * training.microbatch_size * training.sequence_length
        layers = -(-spec.model.num_layers // load.stages)
        sent = volumes(load, layers, averaging.inner_steps)
        return cls(lent, found, used, cost(load, site, used), tokens, sent, times)

    @property
    def load(self) -> Load:
        """What a step asks of a member of the slowest place."""
        return self.found.load

    @property
    def terms(self) -> dict[str, float]:
        """Seconds; together they are the step."""
        found = self.cost
        seconds = found.averaging_s / self.way.inner_steps
        waits = found.compute_s, found.bubble_s, found.boundary_s, seconds, found.barrier_s, -found.hidden_s
        return {name: each for (name, _), each in zip(_TERMS, waits, strict=True)}

    @property
    def tokens_per_day(self) -> float:
        """Of the whole run."""
        return self.tokens * _DAY_S / self.cost.step_s

    def _rules(self) -> dict[str, float]:
        """By the textbook, with one and with two stages of each peer."""
        share = self.load.microbatches / self.load.replicas
        return {str(each): rule_bubble(self.load.stages, share, each) for each in (1, 2)}

    @property
    def hiding_mbit(self) -> float:
        """The line on which boundaries hide behind compute."""
        return hiding_bytes_per_s(self.load, self.way) * 8 / 1e6

    def lines(self) -> list[str]:
        """For a terminal, at most 100 columns."""
        found, faster = self.cost, limits(self.load, self.found.site, self.way)
        least = min(faster, key=lambda name: faster[name])
        twice = ", ".join(
            f"twice the {name} {_seconds(seconds)}" for name, seconds in faster.items() if name != "latency"
        )
        one, two = self._rules().values()
        enough = f"{found.slots} would keep devices busier" if found.slots > self.way.slots else "enough"
        width = max(map(len, self.volumes))
        by = "FLOPs" if self.times is None else "measured layer times"
        return [
            f"a step on {self.lent.words}: {_seconds(found.step_s)}, {_count(self.tokens_per_day)} tokens a day",
            *(
                f"  {name:<9} {_seconds(seconds):>9} {seconds / (found.step_s + found.hidden_s):>5.0%}  {words}"
                for (name, words), seconds in zip(_TERMS, self.terms.values(), strict=True)
                if round(seconds, 4)
            ),
            "",
            f"a microbatch takes {_seconds(self.load.microbatch_s)} in the slowest stage, by {by}",
            f"what limits it most: the {least}; {twice}, half the latency {_seconds(faster['latency'])}",
            f"the line this stage needs, so that boundaries hide behind compute: {self.hiding_mbit:,.3g} Mbit/s",
            f"slots: {self.way.slots}, {enough}",
            f"a pipeline of forwards and backwards alone would wait {one:.0%} of a step, (P-1)/(M+P-1), "
            f"or {two:.0%} with two stages a peer",
            "",
            f"a member sends in a step: {shown(round(found.boundary_bytes))} over boundaries, "
            f"{shown(round(found.averaging_bytes / self.way.inner_steps))} for sums",
            f"what each of {self.load.replicas} would send that shared the stage by one technique, in fp32:",
            *(f"  {name:<{width}}  {shown(round(size)):>10}" for name, size in self.volumes.items()),
        ]

    def record(self) -> dict[str, Any]:
        """As JSON: seconds, bytes."""
        return {
            "members": self.lent.members.model_dump(mode="json"),
            "counts": self.found.counts,
            "place_s": self.found.place_s,
            "measured": self.times is not None,
            "load": asdict(self.load),
            "site": asdict(self.found.site),
            "way": asdict(self.way),
            "step_s": self.cost.step_s,
            "terms_s": self.terms,
            "utilisation": self.cost.utilisation,
            "tokens_per_day": self.tokens_per_day,
            "slots_enough": self.cost.slots,
            "with_twice_s": limits(self.load, self.found.site, self.way),
            "hiding_mbit": self.hiding_mbit,
            "rule_bubble": self._rules(),
            "sent_bytes": {
                "boundary": self.cost.boundary_bytes,
                "averaging": self.cost.averaging_bytes / self.way.inner_steps,
            },
            "techniques_bytes": self.volumes,
        }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if abs(seconds) < 100 else f"{seconds:,.0f} s"


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
