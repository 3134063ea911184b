"""What the dashboard shows of a run: looks at it in, one JSON object out. Pure.

Of the steps it has what `Curve` believes, of peers what `assess` makes of their records, of who came and went what
`Presence` says: nothing that `swarmnet watch` would not show. A record is its peer's own word, and is shown as that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmnet.ids import PeerId
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.presence import TRAINER, Change, Observation, fairly, members, shown
from swarmnet.monitor.waterfall import one_step
from swarmnet.peer.swarm_health import ReplicaLine

MOST_POINTS = 1200
"""Of the curve: more than a screen has columns."""

MOST_PEERS, MOST_STAYS, MOST_MARKS, MOST_COMPLAINTS = 500, 200, 400, 32
"""That are shown; how many there are is said. Of stays and marks the newest, of complaints those of one peer."""

PACE_S = 30.0
"""A replica's microbatches per second are those of about so long."""


@dataclass(slots=True)
class Stay:
    """Somebody's time in a stage, in Unix seconds. began: None: before the first look. ended: None: it is here.

    how: "left" if it had said that it would; "gone" if not; "" while it is here.
    """

    stage: int
    peer: PeerId
    began: float | None = None
    ended: float | None = None
    how: str = ""


@dataclass(slots=True)
class _Executions:
    """How many microbatches a replica says to have executed, when that changed."""

    said: list[tuple[float, int]] = field(default_factory=list)

    def hear(self, executions: int, now: float) -> None:
        if self.said and executions < self.said[-1][1]:
            self.said.clear()  # it was started again
        if not self.said or executions > self.said[-1][1]:
            self.said.append((now, executions))
        while len(self.said) > 2 and self.said[1][0] < now - PACE_S:
            del self.said[0]

    def per_second(self, now: float) -> float:
        """0 if it has executed nothing for a while, or was heard once."""
        if len(self.said) < 2 or self.said[-1][0] < now - PACE_S:
            return 0.0
        (began, first), (_, last) = self.said[0], self.said[-1]
        return (last - first) / max(now - began, 1e-3)


class RunPage:
    """Tell it each look (`look`), then ask what to show (`data`)."""

    def __init__(self, *, now: float) -> None:
        """now: Unix seconds, here and below."""
        self._since = now
        self._seen: Observation | None = None
        self._stays: list[Stay] = []
        self._marks: list[dict[str, Any]] = []
        self._pace: dict[tuple[int, PeerId], _Executions] = {}
        self._columns: dict[str, list[float | int | None]] = {}
        self._step: dict[str, Any] | None = None

    def look(self, seen: Observation, *, now: float) -> None:
        """What is known now."""
        found = seen.found
        if self._seen is None:
            self._stays = [Stay(stage, peer) for stage, peer in sorted(members(found))]
        self._seen = seen
        # Between two steps of a fast run members have nothing to tell: the last step that was told stays.
        self._step = one_step(seen.bars) or self._step
        at = newest.step if (newest := seen.curve.newest) else 0
        for change in seen.changes:
            if change.kind != "problem":
                self._stay(change, now=now)
                self._marks.append({"step": at, "time": now, "kind": change.kind, "text": change.text})
        del self._marks[:-MOST_MARKS]
        ended = [stay for stay in self._stays if stay.ended is not None]
        for stay in ended[: max(len(self._stays) - MOST_STAYS, 0)]:
            self._stays.remove(stay)
        here = {(line.stage, replica.peer): replica for line in found.stages for replica in line.replicas}
        self._pace = {who: self._pace.get(who) or _Executions() for who in here}
        for who, replica in here.items():
            self._pace[who].hear(replica.executions, now)
        if seen.steps or seen.versions or not self._columns:
            self._columns = columns(seen.curve)

    def _stay(self, change: Change, *, now: float) -> None:
        """Note a change of who is there."""
        if change.kind == "went_back":
            return
        peer, stage = change.fields["peer"], change.fields["stage"]
        stage = TRAINER if stage is None else stage
        ends = change.kind in ("left", "gone")
        for stay in self._stays:
            if (stay.stage, stay.peer, stay.ended) == (stage, peer, None):
                stay.ended, stay.how = now, change.kind if ends else "gone"  # who was started again had ended
        if not ends:
            self._stays.append(Stay(stage, peer, now))

    def data(self, *, now: float) -> dict[str, Any]:
        """All that the page shows, as JSON; `{}` before the first look."""
        if self._seen is None:
            return {}
        found = self._seen.found
        replicas = [(line.stage, replica) for line in found.stages for replica in line.replicas]
        drawn = {replica.peer for replica in fairly(line.replicas for line in found.stages)[:MOST_PEERS]}
        counted = {line.stage: sum(replica.counted for replica in line.replicas) for line in found.stages}
        peers: dict[str, dict[str, Any]] = {}
        for stage, replica in replicas:
            if replica.peer in drawn:
                line = self._replica(replica, stage, counted[stage], now=now)
                peers.setdefault(replica.peer, _peer(replica))["stages"].append(line)
        for each in found.complaints:
            complaint = {"by": each.by, "about": each.of.peer, **shown(each.of, "stage how reason seconds")}
            for peer in {each.by, each.of.peer} & peers.keys():
                if len(peers[peer]["complaints"]) < MOST_COMPLAINTS:
                    peers[peer]["complaints"].append(complaint)
        return self._seen.state() | {
            "time": now,
            "since": self._since,
            "seen": found.seen,
            "disputed": self._seen.curve.disputed,
            "admission": None if found.admission is None else asdict(found.admission),
            "stages": [
                {
                    "stage": line.stage,
                    "synced": sum(replica.ready for replica in line.replicas),
                    "replicas": len(line.replicas),
                    "peers": [replica.peer for replica in line.replicas if replica.peer in drawn],
                }
                for line in found.stages
            ],
            "trainers": [trainer.peer for trainer in found.trainers][:MOST_PEERS],
            "num_trainers": len(found.trainers),
            "peers": peers,
            "num_stays": len(self._stays),
            "stays": [asdict(stay) for stay in self._stays[-MOST_STAYS:]],
            "marks": self._marks,
            "curve": self._columns,
            "waterfall": self._step,
        }

    def _replica(self, replica: ReplicaLine, stage: int, counted: int, *, now: float) -> dict[str, Any]:
        return {
            "stage": stage,
            "held": replica.queue,
            "per_second": self._pace[stage, replica.peer].per_second(now),
            "share": replica.counted / counted if counted else None,
            **shown(replica, "state version slots speed executions counted chain disk drift stray still_s"),
        }


def _peer(replica: ReplicaLine) -> dict[str, Any]:
    """What is of the peer and not of its stage; `stages` and `complaints` are filled by the caller."""
    named = shown(replica, "addresses software region restart")
    return {"stages": [], "complaints": [], "numerics": str(replica.numerics), **named}


def columns(curve: Curve, most: int = MOST_POINTS) -> dict[str, list[float | int | None]]:
    """The curve by column: `x` steps or versions, `loss`, `tokens_per_second`, `held_out`; None where none is known.

    most: steps, about; of a long curve each stretch shows its first, its least and its greatest loss.
    """
    points = curve.points
    stretch = -(-3 * len(points) // most) if len(points) > most else 1
    kept = {point.step: point for point in points[-1:]}
    for first in range(0, len(points), stretch):
        some = points[first : first + stretch]
        for point in (some[0], min(some, key=lambda each: each.loss), max(some, key=lambda each: each.loss)):
            kept[point.step] = point
    versions: Mapping[int, float] = curve.evaluations
    if len(versions) > most:
        versions = dict(sorted(versions.items())[:: -(-len(versions) // most)])
    x = sorted(kept.keys() | versions.keys())
    return {
        "x": list(x),
        "loss": [kept[each].loss if each in kept else None for each in x],
        "tokens_per_second": [curve.tokens_per_second(each) if each in kept else None for each in x],
        "held_out": [versions.get(each) for each in x],
    }
