"""What the records of a run say of its audits: who is shut out, in what nobody could be named, and which steps hold
false work. Pure; `peer.swarm_health` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from swarmnet.directory import DisputedWork, Record
from swarmnet.ids import PeerId
from swarmnet.quorum import quorum, reached_by_half


@dataclass(frozen=True, slots=True)
class ConvictLine:
    """A peer that more than half of those who serve call convicted. stages: its own; by: how many of its mates say so,
    most of them for `reason`, which names the step."""

    peer: PeerId
    stages: tuple[int, ...]
    reason: str
    by: int


@dataclass(frozen=True, slots=True)
class DisputeLine:
    """Cases of a stage in which somebody lies and nobody could be named. number: as half of those say who know of any,
    which are `by` replicas. last: the one that most of them name as their last."""

    number: int
    last: DisputedWork
    by: int


@dataclass(frozen=True, slots=True)
class TaintedLine:
    """A step whose sum in that stage holds proven false work, and how many replicas that serve say so."""

    stage: int
    step: int
    by: int


def convicts_of(records: Sequence[Record]) -> tuple[ConvictLine, ...]:
    """Whom most of those who serve have shut out, sorted by peer. What fewer say may be the liars' word."""
    serving = [record for record in records if any(status.synced for status in record.stages)]
    said: dict[PeerId, dict[PeerId, str]] = {}
    for record in serving:
        for each in record.complaints:
            if each.how == "convicted" and each.peer != record.peer:
                said.setdefault(each.peer, {})[record.peer] = each.reason
    out = {peer for peer, by in said.items() if len(by) >= quorum(serving)}
    stages = {record.peer: tuple(status.stage for status in record.stages) for record in records}
    found = []
    for peer in sorted(out):
        reasons = Counter(reason for by, reason in said[peer].items() if by not in out)
        reason = max(reasons, key=lambda each: (reasons[each], each), default="")
        found.append(ConvictLine(peer, stages.get(peer, ()), reason, reasons.total()))
    return tuple(found)


def convicted_here(stage: int, reason: str, at: str) -> str:
    """For the operator of a convict: of what, and what to do. at: the file of evidence; "": there is none."""
    where = (
        f"the evidence is {at}, which `swarmnet audit verify` checks"
        if at
        else "other members of the run hold the evidence"
    )
    return (
        f"this peer is convicted of wrong work in stage {stage}, and the run is over for it: {reason}; {where}. If it "
        "was not told to lie, this machine computes wrongly: test its memory and undo overclocking. Then it may come "
        "back as another peer, with another --dir"
    )


def disputes_of(members: Sequence[Record], out: Set[PeerId]) -> tuple[DisputeLine, ...]:
    """By stage. members: the records of those who serve. out: convicts, whose work nobody disputes any more."""
    of_stage: dict[int, list[tuple[DisputedWork, int]]] = {}
    for record in members:
        last = record.disputed
        here = last is not None and any(status.stage == last.stage for status in record.stages)
        if last is not None and here and last.peer not in out:
            of_stage.setdefault(last.stage, []).append((last, record.num_disputed))
    found = []
    for _, told in sorted(of_stage.items()):
        votes = Counter(last for last, _ in told)
        last = max(votes, key=lambda each: (votes[each], each.step, each.peer))
        found.append(DisputeLine(reached_by_half([number for _, number in told]), last, len(told)))
    return tuple(found)


def tainted_of(members: Sequence[Record]) -> tuple[TaintedLine, ...]:
    """The last such steps, those that most name first. members: the records of those who serve."""
    said = Counter((each.stage, each.step) for record in members for each in dict.fromkeys(record.tainted))
    lines = [TaintedLine(stage, step, by) for (stage, step), by in said.items()]
    return tuple(sorted(lines, key=lambda line: (-line.by, -line.step, line.stage)))
