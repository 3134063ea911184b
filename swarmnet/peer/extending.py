"""What one peer knows of the notices that extend its run: it asks for those it lacks, and says what becomes of each.

Which of them are in force is decided by the commits of each stage (`manifest.extension`); this only spreads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused
from swarmnet.ids import PeerId
from swarmnet.manifest.extension import Notice
from swarmnet.messages import ManifestData, ManifestRequest
from swarmnet.pacing import Budgets, Rate
from swarmnet.state.rollback import Rollbacks
from swarmnet.step.member import Member
from swarmnet.transport import ask

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer

_MOST_ASKED = 1024
"""The number of peers with a remembered last question."""


class Extending:
    """The notices of one peer's run."""

    def __init__(self, peer: Peer, rollbacks: Rollbacks) -> None:
        self._peer, self._notices, self._rollbacks = peer, peer.notices, rollbacks
        self._seen = b""  # the mark of those that were considered
        # A peer that says something else each time costs one question per silence limit.
        self._questions = Budgets[PeerId](Rate.every(peer.timers.suspect_s), _MOST_ASKED)
        self._refused: set[str] = set()
        self._said: set[Notice] = set()

    @property
    def last(self) -> int:
        """The run's last version, if what is known takes force."""
        foreseen = self._notices.foreseen
        ends = [foreseen(member.version, member.horizon).last for member in self._members()]
        return max(ends, default=self._peer.manifest.training.total_steps)

    def hear(self, peer: PeerId, mark: bytes) -> None:
        """What stands for the notices that `peer` knows."""
        # There is no signed one, or they are the same.
        if not mark or mark == self._notices.mark or self._notices.owner is None or peer == self._peer.me:
            return
        if not self._questions.of(peer).ask(loop_time()):
            self._peer.spawn(self._ask(peer))

    async def _ask(self, peer: PeerId) -> None:
        try:
            answer = await ask(self._peer.transport, peer, ManifestRequest(), limit_s=self._peer.timers.long_silence_s)
        except (BadMessage, PeerGone, PeerTimeout, Refused):
            return  # its next heartbeat is as good an occasion
        notices = answer.notices if isinstance(answer, ManifestData) else ()
        for reason in self._notices.learn_all(notices):
            if (told := f"{peer}: {reason}") not in self._refused and len(self._refused) < _MOST_ASKED:
                self._refused.add(told)
                self._peer.say("notice_refused", {"peer": peer, "reason": reason})
        self.consider()

    def consider(self) -> None:
        """Notices may have come, from whomever: say so, and go on if the run was over."""
        if self._notices.mark == self._seen or (newest := self._notices.newest) is None:
            return
        self._seen = self._notices.mark
        self._rollbacks.last_version = self._notices.furthest
        self._peer.say("notice", _fields(newest))
        # The peer has said that it is finished, and is not.
        if self._peer.finished.is_set() and not all(member.done for member in self._members()):
            self._peer.say("extended", {"steps": self.last})
        self._say_what_became()
        self._peer.news.set()

    def moved(self, stage: int) -> None:
        """A replica stands at another version."""
        replica = self._peer.replicas[stage]
        replica.state.checkpoints.ends_at(replica.member.horizon.last)
        self._say_what_became()

    def _members(self) -> list[Member]:
        return [replica.member for replica in self._peer.replicas.values()]

    def _say_what_became(self) -> None:
        """Of each notice once: it is in force, or it came too late."""
        members = [member for member in self._members() if member.synced]
        held = {notice for member in members for notice in member.horizon.notices}
        over = min((member.version for member in members), default=0)
        for notice in self._notices.known:
            in_force, since = notice in held, notice.value.since
            if notice in self._said or not (in_force or since < over):
                continue
            self._said.add(notice)
            if in_force:
                self._peer.say("extended", _fields(notice))
            else:
                reason = f"step {since} was committed without it, so it changes nothing"
                then = "its owner signs another one"
                self._peer.say("notice_missed", {**_fields(notice), "reason": reason, "then": then})


def _fields(notice: Notice) -> dict[str, object]:
    extension = notice.value
    return {"number": extension.number, "since": extension.since, "steps": extension.total_steps}
