"""`swarmnet plan --mbit`: seconds of a step, where they go, and what limits them. Knows no machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from swarmnet.cli.line import MemberLine
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import StageSpec, Wire
from swarmnet.plan.budget import shown
from swarmnet.plan.cost import (
    BYTES,
    CODING_NS,
    Cost,
    Load,
    Way,
    cost,
    limits,
    load_of,
    needed_bytes_per_s,
    rule_bubble,
    volumes,
)

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
    """A step of a run whose members are all alike, in its heaviest stage."""

    line: MemberLine
    load: Load
    way: Way
    cost: Cost
    tokens: int
    """Of a step."""
    volumes: dict[str, float]
    """What techniques would send."""

    @classmethod
    def of(cls, spec: StageSpec, wire: Wire, line: MemberLine, *, slots: int) -> StepTime:
        """spec: of any stage. slots: 0 for as many as are enough. Raises UsageError for a codec of unknown size."""
        averaging, training = spec.averaging, spec.training
        for where, codec, known in (
            ("averaging.codec", averaging.codec, CODING_NS.keys()),
            ("wire.activations", wire.activations, BYTES.keys()),
            ("wire.gradients", wire.gradients, BYTES.keys()),
        ):
            if codec not in known:
                raise UsageError(f'--mbit cannot tell what {where} = "{codec}" costs: leave --mbit out')
        load = load_of(spec, line.site, replicas=line.replicas)
        inner = averaging.inner_steps if averaging.sync == "local" else 1
        way = Way(wire.activations, wire.gradients, averaging.codec, averaging.sync, slots or 1, inner)
        found = cost(load, line.site, way)
        if not slots:
            way = Way(wire.activations, wire.gradients, averaging.codec, averaging.sync, found.slots, inner)
            found = cost(load, line.site, way)
        tokens = training.microbatches * training.microbatch_size * training.sequence_length
        layers = -(-spec.model.num_layers // load.stages)
        return cls(line, load, way, found, tokens, volumes(load, layers, averaging.inner_steps))

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

    def lines(self) -> list[str]:
        """For a terminal, at most 100 columns."""
        found, faster = self.cost, limits(self.load, self.line.site, self.way)
        least = min(faster, key=lambda name: faster[name])
        twice = ", ".join(
            f"twice the {name} {_seconds(seconds)}" for name, seconds in faster.items() if name != "latency"
        )
        mbit = needed_bytes_per_s(self.load, self.line.site, self.way) * 8 / 1e6
        one, two = self._rules().values()
        enough = f"{found.slots} would keep devices busier" if found.slots > self.way.slots else "enough"
        width = max(map(len, self.volumes))
        return [
            f"a step on {self.line}: {_seconds(found.step_s)}, {_count(self.tokens_per_day)} tokens a day",
            *(
                f"  {name:<9} {_seconds(seconds):>9} {seconds / found.step_s:>5.0%}  {words}"
                for (name, words), seconds in zip(_TERMS, self.terms.values(), strict=True)
                if round(seconds, 4)
            ),
            "",
            f"what limits it most: the {least}; {twice}, half the latency {_seconds(faster['latency'])}",
            f"a line that is enough, for nine tenths of what an endless one brings: {mbit:,.0f} Mbit/s",
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
            "line": asdict(self.line),
            "load": asdict(self.load),
            "way": asdict(self.way),
            "step_s": self.cost.step_s,
            "terms_s": self.terms,
            "utilisation": self.cost.utilisation,
            "tokens_per_day": self.tokens_per_day,
            "slots_enough": self.cost.slots,
            "with_twice_s": limits(self.load, self.line.site, self.way),
            "needed_mbit": needed_bytes_per_s(self.load, self.line.site, self.way) * 8 / 1e6,
            "rule_bubble": self._rules(),
            "sent_bytes": {
                "boundary": self.cost.boundary_bytes,
                "averaging": self.cost.averaging_bytes / self.way.inner_steps,
            },
            "volumes_bytes": self.volumes,
        }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if abs(seconds) < 100 else f"{seconds:,.0f} s"


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
