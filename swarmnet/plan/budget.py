"""From what one microbatch takes, and what a stage holds anyway, to the memory of each rank and of its peer process.

One microbatch passes three times: forward, backward, weight pass. What it holds between them is what each further
microbatch in flight adds; the largest peak of a pass comes on top once, because one runs at a time. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

Deltas = tuple[int, ...]
"""Bytes allocated (+) and freed (-), one after the other."""

MIB, GIB = 1 << 20, 1 << 30


def highest(deltas: Deltas, start: int = 0) -> int:
    """The most that is live at any time, of which `start` from the beginning."""
    return max(itertools.accumulate(deltas, initial=start))


@dataclass(frozen=True, slots=True)
class Passage:
    """One microbatch on one rank, in bytes. held: what each further microbatch in flight takes, the larger of what is
    kept after forward and what is kept after backward. peak: the most at any time of a pass."""

    held: int = 0
    peak: int = 0

    @classmethod
    def of(cls, forward: Deltas, backward: Deltas, weights: Deltas) -> Passage:
        """What these deltas come to."""
        stash = sum(forward)
        return cls(max(stash, stash + sum(backward)), highest((*forward, *backward, *weights)))

    def several(self, count: int) -> int:
        """The most that `count` microbatches in flight take together."""
        return (count - 1) * self.held + self.peak if count else 0


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank holds on its device, in bytes.

    parameters: of all versions that are held, casts and an outer optimizer's tensors included. gradients: memory for
    one microbatch's. sums: those of open steps, and the finished one unless it is in the peer process. optimizer:
    moments; offloaded: they are in host memory instead. passing: a microbatch; beside: what is moved out of it to host
    memory. update: the most that an optimizer step takes for a while.
    """

    parameters: int
    gradients: int
    sums: int
    optimizer: int
    passing: Passage
    beside: Passage
    update: int
    offloaded: bool = False

    @property
    def state(self) -> int:
        """What is there always."""
        return self.parameters + self.gradients + self.sums + self.optimizer * (not self.offloaded)

    def lasting(self, in_flight: int) -> int:
        """What is there between jobs, with so many microbatches in flight."""
        return self.state + in_flight * self.passing.held

    def temporary(self, in_flight: int) -> int:
        """What comes on top while a job runs, at the worst moment."""
        return self.peak(in_flight) - self.lasting(in_flight)

    def peak(self, in_flight: int) -> int:
        """The most at any time, with so many microbatches in flight."""
        # An offloaded optimizer updates in host memory.
        update = self.update * (not self.offloaded)
        return self.state + max(self.passing.several(in_flight), in_flight * self.passing.held + update)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the peer process holds in host memory, in bytes. mirrors: whole copies of the state that ranks can be
    started from again. sums: of rounds. rounds: what codec and kind of averaging hold beside them. snapshots: while one
    is written, and one handed on. payloads: what arrived and is sent of microbatches in flight. memo: what is kept for
    who asks again. moments: of an optimizer that is there. stashes: what ranks have moved out of their devices.
    audits: weights and payloads of steps that are over, for whoever computes them again.
    """

    mirrors: int = 0
    sums: int = 0
    rounds: int = 0
    snapshots: int = 0
    payloads: int = 0
    memo: int = 0
    moments: int = 0
    stashes: int = 0
    audits: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class StageBudget:
    """One stage of one peer. ranks: memory of each, in order of rank. in_flight: microbatches, of all open steps.
    on_host: ranks compute on the CPU, so that all is taken of one memory.
    """

    stage: int
    layers: range
    ranks: tuple[RankMemory, ...]
    host: HostMemory
    in_flight: int
    on_host: bool


def together(plans: Sequence[StageBudget]) -> int:
    """The most that a device of one peer with all these stages has to have; the machine, if ranks are on the CPU.

    All devices are theirs, so what lasts adds up.

    One rank is one process that does one job at a time, whichever stage's (`engine.compute_thread`): of what comes on
    top, the largest comes once. Ranks of several are processes of each stage, and a process keeps for itself what its
    largest job took.
    """
    # Processes keep the memory of their largest job; one process uses it for every stage.
    count_once: Callable[[Iterable[int]], int] = max if len(plans[0].ranks) == 1 else sum
    peaks: list[int] = [
        sum(rank.lasting(plan.in_flight) for plan, rank in zip(plans, same, strict=True))
        + count_once(rank.temporary(plan.in_flight) for plan, rank in zip(plans, same, strict=True))
        for same in zip(*(plan.ranks for plan in plans), strict=True)
    ]
    return sum(peaks) + sum(plan.host.total for plan in plans) if plans[0].on_host else max(peaks)


def groups(ranks: Sequence[RankMemory]) -> list[tuple[str, RankMemory]]:
    """Ranks with equal figures together: ("0-6", ...), ("7", ...)."""
    found: list[tuple[str, RankMemory]] = []
    for figures, numbers in itertools.groupby(range(len(ranks)), key=lambda rank: ranks[rank]):
        first, *others = numbers
        found.append((f"{first}-{others[-1]}" if others else str(first), figures))
    return found


def shown(num_bytes: float) -> str:
    """12.3 GiB, 456 MiB, 7.8 KiB: three digits and a unit."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        # From here on it rounds to a whole one of the larger unit.
        if abs(num_bytes) >= 0.9995 * size:
            value = num_bytes / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    return f"{num_bytes:.0f} B"


_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII)


def read_size(text: str) -> int:
    """Bytes of "24GiB", "24 GB", "80g" or "1073741824B". Raises ValueError, in words, also without a unit."""
    number = text.strip().rstrip("KMGTIBkmgtib ")
    unit = text.strip()[len(number) :].strip().upper()
    # A number without a unit is refused: it could be meant in any.
    if not _NUMBER.fullmatch(number) or unit not in _UNITS:
        raise ValueError(f"write a size{' with its unit' if _NUMBER.fullmatch(text.strip()) else ''}, such as 24GiB")
    value = float(number) * _UNITS[unit]
    if not 1 <= value < 1 << 60:
        raise ValueError("must be at least a byte, and less than 1048576 TiB")
    return int(value)
