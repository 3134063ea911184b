"""What a replica holds against its mates, for its record: whom its step waits for, whom it goes on without, and why.

`peer.swarm_health` puts it in words for `swarmnet status`. It decides nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from swarmnet.bounds import Recent
from swarmnet.directory import Complaint
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import FOR_EVER, Trouble
from swarmnet.step.member import Member

_STEPS = 20
"""The usual pace is the median of so many steps."""

_SLOW = 4.0
"""The stage stands still when the step takes so many times as long as usual."""

_LEFT_OUT_S = 30.0
"""Who was left out is named for so long."""

_MOST = 64


class Complaints:
    """Those of one replica. say(event, fields): for the log, once when a mate cannot be connected to."""

    def __init__(self, timers: Timers, say: Callable[[str, dict[str, object]], None], *, now: float) -> None:
        self._timers, self._say = timers, say
        self._steps = deque([now], maxlen=_STEPS)
        self._left_out: Recent[PeerId, tuple[str, float]] = Recent(_MOST)  # reason, when
        self._late: Recent[PeerId, str] = Recent(_MOST)  # reason
        self._convicted: Recent[PeerId, tuple[str, float]] = Recent(_MOST)  # reason, when
        self._disputed: Recent[PeerId, tuple[int, int]] = Recent(_MOST)  # by whose work it is: the last step, how many
        self._said: set[PeerId] = set()

    def on_event(self, event: str, fields: Mapping[str, Any], *, now: float) -> None:
        """Take in one event of the replica."""
        match event:
            case "applied":
                self._steps.append(now)
            # The pause while it fetched its state says nothing about the pace.
            case "synced":
                self._steps = deque([now], maxlen=_STEPS)
            case "evicted":
                self._left_out[fields["peer"]] = fields["reason"], now
            case "late":
                self._late[fields["peer"]] = fields["reason"]
            case "convicted":
                step, reason = f"step {fields['step']}", fields["reason"]
                self._convicted[fields["peer"]] = reason if step in reason else f"{step}: {reason}", now
                # Somebody is named now.
                self._disputed.pop(fields["peer"], None)
            case "disputed" if fields["peer"] not in self._convicted:
                _, number = self._disputed.get(fields["peer"], (0, 0))
                self._disputed[fields["peer"]] = fields["step"], number + 1

    @property
    def disputed(self) -> tuple[int, PeerId] | None:
        """The last work about which somebody lies, and nobody can be named: step, and whose it is."""
        peer = next(reversed(self._disputed), None)
        return None if peer is None else (self._disputed[peer][0], peer)

    @property
    def num_disputed(self) -> int:
        """How many there are."""
        return sum(number for _, number in self._disputed.values())

    def still_s(self, *, now: float) -> int:
        """How long the stage has made no step, if that is much longer than usual; else 0."""
        limit_s = (
            max(2 * self._timers.suspect_s, _SLOW * self._usual_s) if self._usual_s else self._timers.long_silence_s
        )
        still_s = now - self._steps[-1]
        return int(still_s) if still_s > limit_s else 0

    @property
    def _usual_s(self) -> float:
        """How long a step takes; 0 if there was none."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self._steps)]
        return statistics.median_low(gaps) if gaps else 0.0

    def of(self, member: Member, trouble: Trouble | None, *, now: float) -> tuple[Complaint, ...]:
        """What there is to complain of, what matters most first. trouble: of the round it takes part in."""
        unreached = self._cannot_reach(member, now)
        if member.done:
            return ()
        waits = dict(self._waits(member, trouble, now)) if member.synced and self.still_s(now=now) else {}
        return (
            *(
                Complaint(member.stage, peer, "convicted", reason, int(now - at))
                for peer, (reason, at) in self._convicted.items()
            ),
            *(Complaint(member.stage, peer, "waited_for", reason) for peer, reason in waits.items()),
            *(
                Complaint(member.stage, peer, "unreached", "cannot be connected to", int(now - since))
                for peer, since in unreached.items()
            ),
            *(
                Complaint(member.stage, each.peer, "sits_out", self._late.get(each.peer, "was late"), seconds)
                for each in member.membership.exclusions
                if each.until_step < FOR_EVER
                and (seconds := int((each.until_step - member.version) * self._usual_s)) > 0
            ),
            *(
                Complaint(member.stage, peer, "left_out", reason, int(now - at))
                for peer, (reason, at) in self._left_out.items()
                if now - at < _LEFT_OUT_S
            ),
            *(
                Complaint(member.stage, peer, "left_out", "is not heard")
                for peer in sorted(member.view.out_of_touch.keys() - unreached.keys())
                if peer not in self._left_out
            ),
        )

    def _waits(self, member: Member, trouble: Trouble | None, now: float) -> Iterator[tuple[PeerId, str]]:
        """Of two reasons for one mate the later one counts."""
        promised = member.oldest.promised
        if member.oldest.leader is not None:
            yield from member.oldest.leader.waits(now).items()
        elif promised is not None and not member.view.in_touch(promised.peer, now=now):
            yield promised.peer, "keeps the step and is silent"
        # The round sees the streams themselves, so its word comes last.
        if trouble is not None:
            yield from ((late.peer, "holds up the round") for late in trouble.late)
            yield from ((peer, "sends what is refused") for peer in trouble.refused)

    def _cannot_reach(self, member: Member, now: float) -> dict[PeerId, float]:
        """The replicas that are out of touch although they are heard, and since when: they do not answer."""
        view = member.view
        seen = {peer: view.get(peer) for peer in view.out_of_touch}
        heard = {peer for peer, at in seen.items() if at is not None and now - at.heard_at <= view.suspect_s(at)}
        found = {peer: since for peer, since in view.out_of_touch.items() if peer in heard}
        for peer in sorted(found.keys() - self._said):
            self._say("cannot_reach", {"peer": peer, "reason": "it is heard and cannot be connected to"})
        self._said = set(found)
        return found
