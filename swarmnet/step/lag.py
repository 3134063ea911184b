"""When a replica takes its state from another one: it fell behind, lost a fork, or its stage lost a sum. Pure.

Rules 18 and 19. This decides whom to ask and how often; fetching is the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.ids import PeerId
from swarmnet.messages import Commit, Committed, Stamp
from swarmnet.quorum import has_quorum
from swarmnet.step.host import StepHost
from swarmnet.step.membership import Membership
from swarmnet.step.view import View

_MOST_NAMED = 16


class Lag:
    """Watches how far one replica is behind the others of its stage."""

    def __init__(self, view: View, membership: Membership, host: StepHost) -> None:
        self._view, self._membership, self._host = view, membership, host
        self._asked_at = -1e9
        self._alone: set[PeerId] = set()  # who says that it is far ahead, and is not believed
        self._behind_since: float | None = None
        self._orphaned_since: float | None = None

    def caught_up(self) -> None:
        """The replica has moved on."""
        self._behind_since = self._orphaned_since = None
        self._alone &= {peer for peer, _ in self._view.mates()}

    def behind(self, version: int, *, fetching: bool, now: float) -> bool:
        """Another replica is ahead (rule 18): by one step the sum may still be fetched; by more, or for long, the state
        must. Returns True if anything follows now.

        One replica alone is not believed: either most live others of my stage are ahead, or most of another stage are,
        or for two long silences nothing has led me on. fetching: is the sum being fetched?
        """
        if self._behind_since is None:
            self._behind_since = now
        ahead = {
            peer: seen.version
            for peer, seen in self._view.mates()
            if seen.version > version and seen.synced and not self._view.refused(peer)
        }
        timers = self._view.timers
        since_s = now - self._behind_since
        if not self._most_are_ahead(version, now=now) and since_s <= timers.lease_s:
            alone = [(peer, passed) for peer, passed in sorted(ahead.items()) if passed > version + 1]
            fresh = [each for each in alone if each[0] not in self._alone]
            self._alone.update(peer for peer, _ in fresh)
            for peer, passed in fresh[:_MOST_NAMED]:
                self._host.log("ahead_alone", peer=peer, version=passed)
            return bool(fresh)
        # By most replicas: a false claim of one must not take another one out of the step that it fetches.
        far = self._most_are_ahead(version + 1, now=now)
        if far or since_s > 2 * (timers.long_silence_s if fetching else timers.suspect_s):
            return self.resync(tuple(sorted(ahead)), "behind", version, now=now)
        return False

    def _most_are_ahead(self, version: int, *, now: float) -> bool:
        """Is most of the rest of my stage, or of another one, ahead of me?"""
        view = self._view
        for stage in {view.stage, *(stage for stage, _, _ in view.known())}:
            live = self._membership.in_sight(stage, now=now) - ({view.me} if stage == view.stage else set())
            known = ((peer, view.get(peer, stage)) for peer in live)
            ahead = {peer for peer, seen in known if seen is not None and seen.synced and seen.version > version}
            if has_quorum(ahead, live):
                return True
        return False

    def orphaned(self, version: int, *, now: float) -> bool:
        """Have other stages gone past a step that no replica of this stage can end?

        The others applied the step; every peer that held my stage's sum or knew the commits is gone. The sum cannot be
        made again, because the other stages no longer have the weights of that step. True only after two long
        silences, in which a peer that could still help would report.
        """
        view = self._view
        ahead = [
            (stage, peer)
            for stage, peer, seen in view.known()
            if seen.version > version and seen.synced and not view.refused(peer)
        ]
        if not ahead or any(stage == view.stage and peer != view.me for stage, peer in ahead):
            self._orphaned_since = None
            return False
        if self._orphaned_since is None:
            self._orphaned_since = now
        return now - self._orphaned_since > view.timers.lease_s

    def has_other_table(self, commit: Commit, open_step: Stamp, table: bytes, *, now: float) -> bool:
        """Have most others signed another table of exclusions than I was handed with my state? I fetch it again."""
        membership, of = self._membership, open_step
        of_step = (commit.stage, commit.step, commit.chain) == (of.stage, of.step, of.chain)
        if not of_step or commit.table == table or not membership.has_begun:
            return False
        others = membership.live(of.stage, now=now) - {self._view.me}
        signed = has_quorum(membership.signers(membership.with_votes(commit), others), others)
        if signed:
            self.told_other_exclusions(of.step, now=now)
        return signed

    def tell_table(self, acks: Mapping[PeerId, Commit], mine: Commit, open_step: Stamp, *, now: float) -> None:
        """I lead: members that have signed another table of exclusions than mine hear what I sign."""
        for peer, ack in acks.items():
            if ack.table != mine.table and not self.has_other_table(ack, open_step, mine.table, now=now):
                self._host.send(peer, Committed(self._membership.with_votes(mine), open_step.restart))

    def told_other_exclusions(self, version: int, *, now: float) -> None:
        """The stage has committed another table than mine: the replica that handed me the state made mine up."""
        donors = tuple(peer for peer, seen in self._view.mates() if seen.synced)
        self.resync(donors, "exclusions", version, now=now)

    def resync(self, donors: tuple[PeerId, ...], reason: str, version: int, *, now: float) -> bool:
        """Fetch a snapshot from one of these; asked for at most once per silence limit. True if it is now."""
        if not donors or now - self._asked_at < self._view.timers.suspect_s:
            return False
        self._asked_at = now
        self._host.resync(donors)
        self._host.log("resync", reason=reason, version=version)
        return True
