"""What can be done to a local swarm, in words: one frozen value a fault. Knows no file and no process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "join", "drain", "partition", "slow", "kill_all", "kill_rank"]
Phase = Literal["forward", "backward", "averaging", "apply", "snapshot", "fetch"]
Moment = Literal["begin", "end"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to be done, once, and when.

    stage or peer (a name such as "s1-r0"): to whom, or whose step and phase count; neither: chosen by the seed. step:
    in the middle of it, or, with `phase`, in the first such phase from that step on. at_s: seconds since every stage
    had a replica. moment: before that phase's work is done, or after, when nobody has seen the result yet.

    phase "averaging" begins when a contribution is asked for and ends when the sum is in; "snapshot": a donor is about
    to hand over a piece of its state; "fetch": a joiner has just received one, and knows no step.

    "kill_rank": one of its ranks, of a replica that has several; the replica stays.

    for_s: how long a stop, partition or slow link lasts. back_s: when a killed or drained replica returns, None: never.
    groups: who is cut off from whom, or whose links are slow (one group): names of peers, or of stages ("s1").
    """

    kind: Kind
    label: str
    stage: int | None = None
    peer: str | None = None
    step: int | None = None
    at_s: float | None = None
    phase: Phase | None = None
    moment: Moment = "begin"
    for_s: float = 0.0
    back_s: float | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    bytes_per_s: float = 0.0
    latency_s: float = 0.0

    @property
    def takes_away(self) -> bool:
        """Is there a replica less while this lasts?"""
        return self.kind in ("kill", "stop", "drain")

    @property
    def strikes_one(self) -> bool:
        """Is it done to one replica?"""
        return self.takes_away or self.kind == "kill_rank"


@dataclass(frozen=True, slots=True)
class LinkLimit:
    """A slow link: bytes_per_s 0 means unlimited."""

    bytes_per_s: float
    latency_s: float


def unlikely(faults: Iterable[Fault], replicas: Mapping[str, int]) -> list[str]:
    """In words: what of `faults` no replica may ever be there for. replicas: stage by name, those at the start."""
    faults, stages = list(faults), list(replicas.values())
    single = {stage for stage in stages if stages.count(stage) == 1}
    joins = [fault.stage for fault in faults if fault.kind == "join"]
    found: dict[tuple[str, bool], list[str]] = {}
    for fault in faults:
        stage = fault.stage if fault.peer is None else stage_of(fault.peer)
        later = bool(joins) and (stage is None or stage in joins or None in joins)
        if fault.peer is not None and fault.peer not in replicas:
            found.setdefault(("no replica of that name is there", later), []).append(fault.label)
        elif fault.takes_away and (stage in single if stage is not None else bool(single)):
            found.setdefault(("the only replica of a stage is never taken away", later), []).append(fault.label)
    return [
        f"note: {why}, so {'this waits for one that joins' if later else 'this cannot be carried out'}: "
        f"{', '.join(labels)}"
        for (why, later), labels in found.items()
    ]


def stage_of(name: str) -> int | None:
    """1 for "s1-r0" and for "s1"; None for a trainer."""
    head = name.partition("-")[0]
    return int(head[1:]) if head[:1] == "s" and head[1:].isdigit() else None


def names(selector: str, name: str) -> bool:
    """Does `selector` ("s1-r0", "s1", "trainer-0") mean the process `name`?"""
    return selector == name or (
        "-" not in selector and stage_of(selector) is not None and stage_of(selector) == stage_of(name)
    )


def member_of(groups: Sequence[Iterable[str]], name: str) -> int | None:
    """The first group that means `name`; None if none does."""
    for number, group in enumerate(groups):
        if any(names(selector, name) for selector in group):
            return number
    return None


def links_of(name: str, rules: Iterable[Fault], others: Iterable[str]) -> tuple[set[str], Mapping[str, LinkLimit]]:
    """Under these partitions and slow links: whom `name` cannot reach, and at what pace it reaches whom.

    A process in no group of a partition reaches everybody. Of several slow links between two the slowest counts.
    """
    cut: set[str] = set()
    paces: dict[str, LinkLimit] = {}
    for rule in rules:
        mine = member_of(rule.groups, name)
        for other in others:
            theirs = member_of(rule.groups, other)
            if other == name:
                continue
            if rule.kind == "partition" and None not in (mine, theirs) and mine != theirs:
                cut.add(other)
            elif rule.kind == "slow" and (mine is not None or theirs is not None):
                before = paces.get(other, LinkLimit(0.0, 0.0))
                rates = [rate for rate in (before.bytes_per_s, rule.bytes_per_s) if rate]
                paces[other] = LinkLimit(min(rates, default=0.0), max(before.latency_s, rule.latency_s))
    return cut, paces
