"""One replica's reports on the others of its stage, for its record: which peers its step waits for or excludes, and
why.

`peer.swarm_health` puts it in words for `swarmnet status`. It decides nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

from swarmnet.directory import Complaint
from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import FOR_EVER, Trouble
from swarmnet.step.member import Member
from swarmnet.telemetry.run_state import StageState

_SLOW = 4.0
"""The stage stands still when the step takes so many times as long as usual."""

_LEFT_OUT_S = 30.0
"""Who was left out is named for so long."""


class StallReports:
    """Those of one replica, of which `state` is kept. say(event, fields): for the log, once when another replica cannot
    be connected to."""

    def __init__(self, timers: Timers, state: StageState, say: Callable[[str, dict[str, object]], None]) -> None:
        self._timers, self._state, self._say = timers, state, say
        self._said: set[PeerId] = set()

    @property
    def disputed(self) -> tuple[int, PeerId] | None:
        """The last disputed work without a peer proven at fault: its step, and its peer."""
        peer = next(reversed(self._state.disputed), None)
        return None if peer is None else (self._state.disputed[peer][0], peer)

    @property
    def num_disputed(self) -> int:
        """How many there are."""
        return sum(number for _, number in self._state.disputed.values())

    def still_s(self, *, now: float) -> int:
        """How long the stage has made no step, if that is much longer than usual; else 0."""
        limit_s = (
            max(2 * self._timers.suspect_s, _SLOW * self._usual_s) if self._usual_s else self._timers.long_silence_s
        )
        still_s = now - self._state.paced[-1]
        return int(still_s) if still_s > limit_s else 0

    @property
    def _usual_s(self) -> float:
        """How long a step takes; 0 if there was none."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self._state.paced)]
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
                for peer, (reason, at) in self._state.convicted.items()
            ),
            *(Complaint(member.stage, peer, "waited_for", reason) for peer, reason in waits.items()),
            *(
                Complaint(member.stage, peer, "unreached", "cannot be connected to", int(now - since))
                for peer, since in unreached.items()
            ),
            *(
                Complaint(member.stage, each.peer, "sits_out", self._state.late.get(each.peer, "was late"), seconds)
                for each in member.membership.exclusions
                if each.until_step < FOR_EVER
                and (seconds := int((each.until_step - member.version) * self._usual_s)) > 0
            ),
            *(
                Complaint(member.stage, peer, "left_out", reason, int(now - at))
                for peer, (reason, at) in self._state.evicted.items()
                if now - at < _LEFT_OUT_S
            ),
            *(
                Complaint(member.stage, peer, "left_out", "sends no heartbeats")
                for peer in sorted(member.view.out_of_touch.keys() - unreached.keys())
                if peer not in self._state.evicted
            ),
        )

    def _waits(self, member: Member, trouble: Trouble | None, now: float) -> Iterator[tuple[PeerId, str]]:
        """Of two reasons for one replica the later one counts."""
        promised = member.oldest.promised
        if member.oldest.leader is not None:
            yield from member.oldest.leader.waits().items()
        elif promised is not None and not member.view.in_touch(promised.peer, now=now):
            yield promised.peer, "keeps the step and is silent"
        # The round sees the streams themselves, so its word comes last.
        if trouble is not None:
            yield from ((late.peer, "holds up the round") for late in trouble.late)
            yield from ((peer, "sends what is refused") for peer in trouble.refused)

    def _cannot_reach(self, member: Member, now: float) -> dict[PeerId, float]:
        """The replicas that are out of touch although their heartbeats arrive, and since when: they do not answer."""
        view = member.view
        seen = {peer: view.get(peer) for peer in view.out_of_touch}
        heard = {peer for peer, at in seen.items() if at is not None and now - at.heard_at <= view.suspect_s(at)}
        found = {peer: since for peer, since in view.out_of_touch.items() if peer in heard}
        for peer in sorted(found.keys() - self._said):
            self._say("cannot_reach", {"peer": peer, "reason": "its heartbeats arrive, but it cannot be connected to"})
        self._said = set(found)
        return found
