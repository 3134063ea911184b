"""Which peers were late, as one replica has observed it. Pure.

An observation excludes no peer: a leader proposes what it has observed with its round (`Round.late`), and the commit
excludes (`step.exclusion`). Until then the observer does not wait for the peer, and does not follow it as leader.

| a step waits for | charged is | what cancels it |
|---|---|---|
| a member's state or signature, or its stream | the latest member | a voter left: that one, `unproven_s` at most |
| a member that waits for the next stage | none, up to three debts; then the member | |
| its leader: no replica computes or exchanges | the leader, `unproven_s` at most | a contributor was lost |
| those whom the leader names | none, up to three debts; then the leader | a commit names one |
| a member that waits for one holder's stream | the end of more broken links | kept apart: the member |

How much each is charged its function says. A debt above 1.5 x `suspect_s`, or a third of it while an exclusion of the
peer is remembered, is lateness; it falls by one second in 16.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from swarmnet.bounds import Recent
from swarmnet.ids import Generation, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.quorum import quorum
from swarmnet.step.host import StepHost

_MOST_PEERS = 4096

_SHARE = 16.0
"""A peer may be late for one of so many seconds."""

_EXCUSED = 3
"""So many times the debt that excludes a peer it may wait for others, by its own word."""


def _added(debt: tuple[float, float], cost_s: float, now: float) -> float:
    """A debt, as (seconds, when they were added up), and what comes to it."""
    debt_s, since = debt
    return max(debt_s - (now - since) / _SHARE, 0.0) + cost_s


class Lateness:
    """What one replica has observed; a peer that was never late is not in it."""

    def __init__(self, timers: Timers, host: StepHost) -> None:
        self._host = host
        self._lasts_s, self._worth_s = timers.lease_s, 1.5 * timers.suspect_s
        self._beat_s = timers.beat_s
        self._debts = Recent[PeerId, tuple[float, float]](_MOST_PEERS)  # seconds, when they were added up
        self._until = Recent[PeerId, float](_MOST_PEERS)
        self._in_step = Recent[PeerId, None](_MOST_PEERS)  # observed in the step that is applied next: lasts for it
        # Who has waited for others by its own word, as debts: leaders, and members.
        self._leaders_waits = Recent[PeerId, tuple[float, float]](_MOST_PEERS)
        self._members_waits = Recent[PeerId, tuple[float, float]](_MOST_PEERS)
        self._pardoned: set[PeerId] = set()
        self._agreed = Recent[PeerId, float](_MOST_PEERS)  # when most had last observed it; forgotten once it is named
        self._named_by = Recent[PeerId, PeerId](_MOST_PEERS)  # the leader of the last commit that named a peer
        self._remembered: Collection[PeerId] = ()  # peers whose exclusion is not forgotten

    def observe(self, peer: PeerId, reason: str, *, pardon: bool = False, now: float) -> None:
        """The stage has waited for the peer without result. pardon: the first time is no lateness."""
        # The observer no longer waits for it, or has pardoned it.
        if self.is_late(peer, now=now):
            return
        if pardon and peer not in self._pardoned and len(self._pardoned) < _MOST_PEERS:
            self._pardoned.add(peer)
            return
        self._until[peer] = now + self._lasts_s
        self._in_step[peer] = None
        self._host.log("late", peer=peer, reason=reason)

    def charge(self, peer: PeerId, reason: str, *, cost_s: float, now: float) -> None:
        """The peer has cost the stage so many seconds: lateness, if it adds up to more than a share of all time.

        A third of the debt is enough while an exclusion of it is remembered: else a peer that slows all steps down
        costs the whole debt again after each exclusion.
        """
        debt_s = _added(self._debts.pop(peer, (0.0, now)), cost_s, now)
        if debt_s > self._limit_s(peer):
            self.observe(peer, reason, now=now)
        else:
            self._debts[peer] = debt_s, now

    def charge_leader(self, leader: PeerId, *, over_s: float, rest_s: float, waits_s: float, now: float) -> None:
        """A step is over that was so much longer than usual.

        rest_s: while nothing kept the leader from leading on, as far as is known here. waits_s: while it said that it
        waits for others; that is no excuse for longer than what it takes to have them excluded.
        """
        rest_s += self._unexcused_s(self._leaders_waits, leader, waits_s, now)
        cost_s = min(over_s, rest_s - self._beat_s, self.unproven_s(leader))
        if cost_s > 0.0:
            self.charge(leader, "leads, and steps are slow", cost_s=cost_s, now=now)

    def unexcused_s(self, member: PeerId, waits_s: float, *, now: float) -> float:
        """The member has waited for others so long, by its own word: how much of that is no excuse any more?"""
        return self._unexcused_s(self._members_waits, member, waits_s, now)

    def _unexcused_s(
        self, excuses: Recent[PeerId, tuple[float, float]], peer: PeerId, waits_s: float, now: float
    ) -> float:
        said_s, most_s = _added(excuses.pop(peer, (0.0, now)), waits_s, now), _EXCUSED * self._worth_s
        excuses[peer] = min(said_s, most_s), now
        return max(said_s - most_s, 0.0)

    def unproven_s(self, peer: PeerId) -> float:
        """The most that one step costs a peer which others may have kept: less than what makes it late."""
        return self._limit_s(peer) * 3 / 4

    def _limit_s(self, peer: PeerId) -> float:
        return self._worth_s / 3 if peer in self._remembered else self._worth_s

    def agree(self, peers: Collection[PeerId], *, now: float) -> None:
        """Most replicas have observed these to be late."""
        self._agreed.update(dict.fromkeys(peers, now))

    def committed(
        self,
        late: Collection[PeerId],
        table: Collection[PeerId],
        leader: PeerId,
        voters: Collection[PeerId] = (),
        *,
        now: float,
    ) -> None:
        """A commit of this leader has named these, and the table of exclusions takes over. table: all peers in it.
        voters: of the step. A leader that names a new key, which costs nothing, has not waited for any voter.

        A leader may name what it alone has observed, as most lateness shows to the leader only. But before it can name
        the same peer again, another leader, or most others, must find the same; else correct peers would be excluded
        for as long as a Byzantine leader leads now and then.
        """
        self._remembered = table
        self._named_by.drop(lambda peer, _: peer not in table)
        if not set(voters).isdisjoint(late):
            self._leaders_waits.pop(leader, None)
        for peer in late:
            agreed_at = self._agreed.pop(peer, None)
            found = self.is_late(peer, now=now) or (agreed_at is not None and now - agreed_at <= self._lasts_s)
            self._until.pop(peer, None)
            self._in_step.pop(peer, None)
            if not found and self._named_by.get(peer) == leader:
                self.observe(leader, "names the same peer late again", now=now)
            self._named_by[peer] = leader
        self._in_step.clear()

    def may_name(self, peer: PeerId, me: PeerId) -> bool:
        """May I name this excluded peer again, although I alone have observed it?"""
        return self._named_by.get(peer, me) != me  # I may have named it in an earlier life

    def is_late(self, peer: PeerId, *, now: float) -> bool:
        """Was it observed to be late, and no commit has named it since?"""
        return peer in self._in_step or now < self._until.get(peer, now)

    def late(self, *, now: float) -> list[PeerId]:
        """The peers that were; the latest first."""
        return [peer for peer in reversed(self._until) if self.is_late(peer, now=now)]


class WaitTimes:
    """How long replicas were waited for, in seconds."""

    def __init__(self, now: float) -> None:
        self.seconds: dict[PeerId, float] = {}
        self._waits_for: Collection[PeerId] = ()
        self._noted_at = now

    def note(self, peers: Collection[PeerId], *, now: float) -> None:
        """These are waited for from now on."""
        for peer in self._waits_for:
            self.seconds[peer] = self.seconds.get(peer, 0.0) + now - self._noted_at
        self._waits_for, self._noted_at = peers, now


class Delays:
    """Which members one step has waited for, and how long: for reports, streams, or signatures."""

    def __init__(self, timers: Timers, now: float) -> None:
        self._timers, self._began_at = timers, now
        self._late, self._away, self._unsigned = WaitTimes(now), WaitTimes(now), WaitTimes(now)
        self._voters: Set[PeerId] = frozenset()  # in the last attempt
        self._newcomers: Set[PeerId] = frozenset()  # in the last attempt; Invariant: none of them is a voter
        self._gone: Set[PeerId] = frozenset()  # voters without which the step has gone on

    def note(
        self,
        waits_for: Set[PeerId],
        members: int,
        *,
        away: Set[PeerId] = frozenset(),
        signatures: bool = False,
        now: float,
    ) -> None:
        """The members that the step waits for from now on. None is to blame unless most members are ready.

        away: those that wait for the next stage, as they say.
        """
        waits_for = waits_for if len(waits_for) < quorum(members) else frozenset()
        self._late.note(waits_for - away, now=now)
        self._away.note(waits_for & away, now=now)
        self._unsigned.note(waits_for if signatures else (), now=now)

    def opened(self, voters: Set[PeerId], newcomers: Set[PeerId] = frozenset(), *, now: float) -> None:
        """An attempt with these voters, and members that have no vote yet.

        Voters that the step goes on without since the last one have kept the others waiting: these owe nothing for that
        time. A newcomer may have, too; but a key that has contributed nothing could come and go in each step, so that
        excuse is bounded as that of a member which waits for the next stage.
        """
        gone, self._voters = self._voters - voters, voters
        left, self._newcomers = self._newcomers - newcomers - voters, newcomers
        self._gone |= gone
        if left:
            for waits in (self._late, self._unsigned):
                waits.note((), now=now)
            for peer, seconds in self._late.seconds.items():
                self._away.seconds[peer] = self._away.seconds.get(peer, 0.0) + seconds
            self._late.seconds, self._unsigned.seconds = {}, {}
        for waits in (self._late, self._away, self._unsigned) if gone else ():
            waits.note((), now=now)
            waits.seconds = {peer: seconds for peer, seconds in waits.seconds.items() if peer in gone}

    def charge(self, lateness: Lateness, me: PeerId, named: Collection[PeerId], *, now: float) -> None:
        """The step is over. The latest member is charged the time that it was late beyond half of the time that the
        others took, as the others may have waited for it themselves; or its signature beyond a quarter, because it only
        has to sign and no member computes any more. named: the peers that the step's commit names as late."""
        self.note(frozenset(), 0, now=now)
        for peer, waits_s in self._away.seconds.items():
            late_s = self._late.seconds.get(peer, 0.0) + lateness.unexcused_s(peer, waits_s, now=now)
            self._late.seconds[peer] = late_s
        found = [(late_s, peer) for peer, late_s in self._late.seconds.items() if peer not in named]
        late_s, peer = max(found, default=(0.0, me))
        alone_s = max(now - self._began_at - max(self._late.seconds.values(), default=0.0), 0.0)
        unsigned_s = self._unsigned.seconds.get(peer, 0.0)
        cost_s = max(late_s - alone_s / 2 - self._timers.settle_s, unsigned_s - alone_s / 4)
        # Why the step went on without a member its leader knows: another one may have kept it.
        if peer in self._gone:
            cost_s = min(cost_s, lateness.unproven_s(peer))
        if peer != me and cost_s > 0.0:
            lateness.charge(peer, "slows the steps down", cost_s=cost_s, now=now)


class LeaderWaits:
    """How long one step has waited for its leader alone, and for others as that one says. Of one leader: another ballot
    of it changes nothing."""

    def __init__(self, leader: PeerId | None, now: float) -> None:
        self.leader, self._waits = leader, WaitTimes(now)
        self._lost: Set[object] | None = None  # peers out of touch, as of the last beat

    def note(self, waits_for: Collection[PeerId], *, now: float) -> None:
        """The step waits for its leader, or as the leader says for these."""
        self._waits.note(waits_for, now=now)

    def lost(self, peers: Set[object]) -> None:
        """These are out of touch. The leader has to find out about those that were not yet, and to have work done
        again: it owes nothing for the time before."""
        if self._lost is not None and peers - self._lost:
            self._waits.seconds.clear()
        self._lost = peers

    def seconds(self, *, now: float) -> tuple[float, float]:
        """For the leader; and for the one that it says it waited for longest."""
        self._waits.note((), now=now)
        others = [seconds for peer, seconds in self._waits.seconds.items() if peer != self.leader]
        mine = self._waits.seconds.get(self.leader, 0.0) if self.leader is not None else 0.0
        return mine, max(others, default=0.0)


class Waits:
    """The replicas that one term waits for, and how long: for their states, their last gradients, their signatures.

    early: wants that are answered once all states are here. missing: replicas with an awaited state at the last
    look. complete: there were none, and none was lost since.
    last_since: members that still have gradients to accumulate while most have none, and since when. behind_at: when no
    member was behind last. states: for the states of replicas in touch.
    """

    def __init__(self, now: float) -> None:
        self.began_at = self.behind_at = now
        self.early: dict[tuple[PeerId, int], Generation] = {}
        self.missing: set[PeerId] = set()
        self.complete = False
        self.last_since: dict[PeerId, float] = {}
        self.states = WaitTimes(now)

    def all_reported(self, members: Collection[PeerId], *, now: float) -> None:
        """No state is awaited any more; the states of members that are lost later are awaited again."""
        self.states.note((), now=now)
        for peer in members:
            self.states.seconds.pop(peer, None)

    def for_last(self, left: Set[PeerId], *, now: float) -> None:
        """These members are the last that have gradients to accumulate."""
        self.last_since = {peer: self.last_since.get(peer, now) for peer in left}
