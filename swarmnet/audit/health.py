"""What the records of a run report of its audits: banned peers, undecided cases, and steps that hold false work. Pure;
`peer.swarm_health` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from swarmnet.directory import DisputedWork, Record
from swarmnet.ids import PeerId
from swarmnet.quorum import quorum, reached_by_half


@dataclass(frozen=True, slots=True)
class BannedLine:
    """A peer that more than half of the serving replicas report as banned. stages: its own; by: how many replicas of
    its stages report it, most of them for `reason`, which names the step."""

    peer: PeerId
    stages: tuple[int, ...]
    reason: str
    by: int


@dataclass(frozen=True, slots=True)
class DisputeLine:
    """Cases of a stage that prove a fault but no peer at fault. number: the median of the reports, which come from `by`
    replicas. last: the case that most of them report as their last."""

    number: int
    last: DisputedWork
    by: int


@dataclass(frozen=True, slots=True)
class TaintedLine:
    """A step with proven false work in that stage's aggregate, and how many serving replicas report it."""

    stage: int
    step: int
    by: int


def banned_of(records: Sequence[Record]) -> tuple[BannedLine, ...]:
    """Peers that most serving replicas have banned, sorted by peer. Fewer reports may all come from Byzantine peers."""
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
        found.append(BannedLine(peer, stages.get(peer, ()), reason, reasons.total()))
    return tuple(found)


def ban_notice(stage: int, reason: str, at: str) -> str:
    """For the operator of a banned peer: the reason, and what to do. at: the file of evidence; "": there is none."""
    where = (
        f"the evidence is {at}, which `swarmnet audit verify` checks"
        if at
        else "other members of the run hold the evidence"
    )
    return (
        f"this peer is banned for wrong work in stage {stage}, and the run is over for it: {reason}; {where}. If it "
        "runs unmodified code, this machine computes wrongly: test its memory and undo overclocking. Then it may come "
        "back as another peer, with another --dir"
    )


def disputes_of(members: Sequence[Record], out: Set[PeerId]) -> tuple[DisputeLine, ...]:
    """By stage. members: the records of the serving replicas. out: banned peers; their work is no longer disputed."""
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
