"""Which machines a fleet has: the tables of a file that `swarmnet plan`, `init` and `simulate` read, by one reader.

Kinds of machines with their number, memory, speed, line and region; machines that are drawn; round trips between
regions. docs/plan.md, docs/simulate.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from swarmnet.config import toml
from swarmnet.config.check import SettingsLayer, check, resolve
from swarmnet.config.table import CliOption, Table, says
from swarmnet.errors import UsageError

TFLOPS = {"cuda": 30.0, "cpu": 0.08}
"""What a device reaches: two fifths of a 24 GB card's bf16, one core."""

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
    gpu_gbit: Annotated[float, Field(gt=0, le=1e5)] = says(100.0, "Gbit/s each way between its GPUs, as a mesh uses")
    host_gib: Gib = says(0.0, "of the machine, in which it also computes on the CPU; 0: enough")
    mbit: Annotated[float, Field(gt=0, le=1e6)] = says(100.0, "of its line, the narrower direction")
    region: str = says("", "one of regions.names")

    @property
    def flops_per_s(self) -> float:
        """Of a machine, in training."""
        return 1e12 * (self.tflops or TFLOPS[self.device] * (self.gpus if self.device == "cuda" else 1))

    @property
    def mesh_bytes_per_s(self) -> float:
        """Each way, between its GPUs."""
        return self.gpu_gbit * 1e9 / 8

    @property
    def bytes_per_s(self) -> float:
        """Each way."""
        return self.mbit * 1e6 / 8

    @property
    def device_bytes(self) -> int | None:
        """Bytes of each device, of the machine if it computes on the CPU; None: not given."""
        gib = self.gpu_gib if self.device == "cuda" else self.host_gib
        return round(gib * 2**30) or None

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory, for machines that compute on GPUs; None: not given, or there are no GPUs."""
        return round(self.host_gib * 2**30) or None if self.device == "cuda" else None


Span = Annotated[tuple[Annotated[float, Field(gt=0, le=1e9)], ...], Field(min_length=1, max_length=2)]
"""[1.0], or [from, to]: drawn in between, evenly on a logarithmic scale."""


class DrawnMachine(Table):
    """Machines that are drawn: those of `peers` that no `[[machines]]` describes."""

    speed: Span = says((0.5, 2.0), "of its device; 1 is 30 TFLOP/s in training")
    up_mbit: Span = says((100.0, 400.0), "of its line, sending")
    down_mbit: Span = says((200.0, 1000.0), "of its line, receiving")
    memory_gb: Span = says((8.0, 24.0), "holds a stage's state and its sums, and in the rest microbatches")
    region: str = says("", "one of regions.names; empty: any")

    def typical(self, count: int) -> MachineKind:
        """So many, in the middle of what is drawn."""
        speed, up, down, memory = (
            math.sqrt(span[0] * span[-1]) for span in (self.speed, self.up_mbit, self.down_mbit, self.memory_gb)
        )
        return MachineKind(
            name="drawn",
            count=count,
            tflops=TFLOPS["cuda"] * speed,
            gpu_gib=memory * 1e9 / 2**30,
            mbit=min(up, down),
            region=self.region,
        )


class FleetRegions(Table):
    """Where machines are."""

    count: Annotated[int, CliOption("K", name="regions"), Field(ge=1, le=100)] = says(3, "where peers are")
    names: tuple[str, ...] = says((), 'of the regions; none: "r0", "r1", ...')
    near_ms: Milliseconds = says(10.0, "round trip in a region")
    far_ms: Span = says((60.0, 200.0), "round trip between two, drawn")
    rtt_ms: tuple[tuple[Milliseconds, ...], ...] = says((), "a row for each region: all round trips")
    usual_ms: Milliseconds = says(ROUND_TRIP_MS, "what `plan` and `init` take where no row says it")

    @model_validator(mode="after")
    def _square(self) -> Self:
        rows, size = self.rtt_ms, len(self.names or self.rtt_ms)
        if rows and (len(rows) != size or any(len(row) != size for row in rows)):
            raise ValueError(f"rtt_ms has {len(rows)} rows: {size} regions need {size} rows of {size} numbers")
        if any(rows[one][other] != rows[other][one] for one in range(len(rows)) for other in range(one)):
            raise ValueError("rtt_ms: the way back takes as long: row i, column j is row j, column i")
        if len(set(self.names)) != len(self.names):
            raise ValueError("names has a region twice")
        return self

    @property
    def all_names(self) -> tuple[str, ...]:
        """Of all regions."""
        return self.names or tuple(f"r{number}" for number in range(len(self.rtt_ms) or self.count))

    def seconds(self, one: str, other: str) -> float:
        """A round trip between two regions."""
        names = self.all_names
        if self.rtt_ms and one in names and other in names:
            return self.rtt_ms[names.index(one)][names.index(other)] / 1000
        return self.usual_ms / 1000


class Members(Table):
    """Machines that are given to stages."""

    machines: tuple[MachineKind, ...] = ()
    regions: FleetRegions = FleetRegions()

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
            if kind.region and kind.region not in self.regions.all_names:
                raise ValueError(f'machines: region = "{kind.region}" is none of {", ".join(self.regions.all_names)}')
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
        return cls(machines=(kind,), regions=FleetRegions(usual_ms=round_trip_s * 1000))

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


F = TypeVar("F", bound=Table)


def read_fleet(path: Path | None, schema: type[F], layers: Sequence[SettingsLayer] = ()) -> F:
    """The fleet of a file and of what is said over it. Raises UsageError, one line, for a file that describes none."""
    data = toml.read(path) if path is not None else {}
    here = str(path) if path is not None else "this fleet"
    entries = data.get("machines", [])
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise UsageError(f"{here}: machines: write [[machines]] above each kind of machine")
    for number, entry in enumerate(entries, 1):
        # A mistake in one of several is said with its number.
        check(MachineKind, entry, origin=partial(_at, f"{here}: [[machines]] number {number}"))
    return resolve(schema, [SettingsLayer(here, data), *layers], where=here)


def _at(here: str, _: tuple[str, ...]) -> str:
    return here
