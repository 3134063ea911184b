"""Which machines members have: a fleet, as `--fleet FILE` describes it to `swarmnet plan` and `swarmnet init`.

Kinds of machines with their number, memory, speed, line and region, and round trips between regions. docs/plan.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarmnet.config.table import Table, says

TFLOPS = {"cuda": 30.0, "cpu": 0.08}
"""What a device reaches: two fifths of a 24 GB card's bf16, one core (docs/performance.md)."""

ROUND_TRIP_MS = 50.0
MOST_MACHINES = 10_000


Gib = Annotated[float, Field(ge=0, le=1e6)]
Milliseconds = Annotated[float, Field(gt=0, le=60_000)]


class MachineKind(Table):
    """Machines that are alike: an entry of `[[machines]]`."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$", max_length=32)] = says("machines", "letters and digits")
    count: Annotated[int, Field(ge=1, le=MOST_MACHINES)] = says(1, "of them")
    device: Literal["cuda", "cpu"] = says("cuda", "what they compute on")
    gpus: Annotated[int, Field(ge=1, le=64)] = says(1, "of each; all are of one peer, as a mesh")
    tflops: Annotated[float, Field(ge=0, le=1e6)] = says(0.0, "TFLOP/s of each in training; 0: 30 a GPU, 0.08 on a CPU")
    gpu_gib: Gib = says(0.0, "of each GPU; 0: enough")
    host_gib: Gib = says(0.0, "of the machine, in which it also computes on the CPU; 0: enough")
    mbit: Annotated[float, Field(gt=0, le=1e6)] = says(100.0, "of its line, the narrower direction")
    region: str = says("", "one of regions.names")

    @property
    def flops_per_s(self) -> float:
        """Of a machine, in training."""
        return 1e12 * (self.tflops or TFLOPS[self.device] * (self.gpus if self.device == "cuda" else 1))

    @property
    def bytes_per_s(self) -> float:
        """Each way."""
        return self.mbit * 1e6 / 8

    @property
    def room(self) -> int | None:
        """Bytes of each device, of the machine if it computes on the CPU; None: nobody said."""
        gib = self.gpu_gib if self.device == "cuda" else self.host_gib
        return round(gib * 2**30) or None

    @property
    def host_room(self) -> int | None:
        """Bytes beside GPUs; None: nobody said, or there are none."""
        return round(self.host_gib * 2**30) or None if self.device == "cuda" else None


class RoundTrips(Table):
    """Between members, in milliseconds."""

    names: tuple[str, ...] = says((), "of regions")
    rtt_ms: tuple[tuple[Milliseconds, ...], ...] = says((), "a row for each region")
    usual_ms: Milliseconds = says(ROUND_TRIP_MS, "where no row says it")

    @model_validator(mode="after")
    def _square(self) -> Self:
        rows, size = self.rtt_ms, len(self.names)
        if rows and (len(rows) != size or any(len(row) != size for row in rows)):
            raise ValueError(f"rtt_ms has {len(rows)} rows: {size} regions need {size} rows of {size} numbers")
        return self

    def seconds(self, one: str, other: str) -> float:
        """A round trip between two regions."""
        if self.rtt_ms and one in self.names and other in self.names:
            return self.rtt_ms[self.names.index(one)][self.names.index(other)] / 1000
        return self.usual_ms / 1000


class Members(Table):
    """A fleet, as `--fleet FILE` describes it."""

    machines: tuple[MachineKind, ...] = ()
    regions: RoundTrips = RoundTrips()

    @model_validator(mode="after")
    def _known(self) -> Self:
        if not self.machines:
            raise ValueError("write [[machines]] above each kind of machine")
        names = [kind.name for kind in self.machines]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f'machines: two kinds have name = "{twice[0]}"')
        if self.count > MOST_MACHINES:
            raise ValueError(f"machines: {self.count} are more than {MOST_MACHINES}")
        for kind in self.machines:
            if kind.region and kind.region not in self.regions.names:
                raise ValueError(f'machines: region = "{kind.region}" is none of regions.names: add it there')
        return self

    @property
    def count(self) -> int:
        """Of all machines."""
        return sum(kind.count for kind in self.machines)

    @classmethod
    def alike(
        cls, count: int, *, mbit: float, tflops: float, round_trip_s: float, device: Literal["cuda", "cpu"] = "cuda"
    ) -> Members:
        """So many machines of one kind."""
        kind = MachineKind(count=count, mbit=mbit, tflops=tflops, device=device)
        return cls(machines=(kind,), regions=RoundTrips(usual_ms=round_trip_s * 1000))

    def round_trips(self, counts: Sequence[int]) -> tuple[float, float]:
        """(the mean, the longest) between two of so many machines of each kind, seconds."""
        pairs = [
            (one * (other - (first == second)), self.regions.seconds(mine.region, theirs.region))
            for first, (one, mine) in enumerate(zip(counts, self.machines, strict=True))
            for second, (other, theirs) in enumerate(zip(counts, self.machines, strict=True))
            if one * (other - (first == second))
        ]
        if not pairs:
            return self.regions.usual_ms / 1000, self.regions.usual_ms / 1000
        return sum(n * each for n, each in pairs) / sum(n for n, _ in pairs), max(each for _, each in pairs)
