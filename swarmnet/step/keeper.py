"""The replica that holds a stage's ledger for one step, under one ballot. Pure.

Hands out indexes, evicts the dead, opens rounds, adopts finished sums, publishes the commit. A wrong keeper can waste
time; it cannot make a wrong sum (docs/protocol.md, I2). It knows nothing of compute, and of its own replica only what
any member reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from swarmnet.ids import Ballot, Generation, PeerId, RoundId
from swarmnet.messages import (
    NONE,
    Claim,
    Commit,
    Committed,
    Evicted,
    Finished,
    Granted,
    Indexes,
    Moved,
    Prepare,
    Release,
    Report,
    Round,
    Stamp,
)
from swarmnet.step.actions import Action, Broadcast, Note, Send
from swarmnet.step.barrier import agreed
from swarmnet.step.dispute import Again, Dispute, Leave
from swarmnet.step.findings import Findings
from swarmnet.step.idle import Orders
from swarmnet.step.ledger import Ledger
from swarmnet.step.lines import Lines
from swarmnet.step.opening import Opening, left_alone
from swarmnet.step.progress import Progress
from swarmnet.step.strikes import Strikes
from swarmnet.step.view import Seen, View

_LATE, _LATE_S = 8.0, 10.0
"""Whoever lacks a sum so many times as long as it took to make, and for so many seconds, is not waited for."""


class Keeper:
    """One term of office. Discard it when a higher ballot is promised or the step is over.

    oldest: is the step applied next where I keep? Only then it opens rounds and orders what is idle. delay: how many
    versions the weights of a step are behind it. given: what had an owner under the keeper before. idle_s: how long
    nothing may be claimed before what is free is executed on the keeper's order. max_void: how many non-finite indexes
    a step may leave out; with more it does not end. group_size: of a round, see `averaging.grid`.
    numbers: of rounds, see `round_numbers`. lines, strikes: what is known from the steps before.
    """

    def __init__(
        self, stamp: Stamp, ballot: Ballot, num_indexes: int, view: View, *, idle_s: float, max_void: int,
        delay: int = 0, group_size: int = 16, numbers: Iterator[int], oldest: bool = True, now: float,
        given: Indexes = NONE, lines: Lines | None = None, strikes: Strikes | None = None,
    ) -> None:
        self.stamp, self.ballot, self.view = stamp, ballot, view
        self._delay, self.oldest, self._lines = delay, oldest, lines or Lines()
        self._strikes = strikes or Strikes(view.timers)
        self.ledger = Ledger(num_indexes, given)
        self.members: dict[PeerId, Generation] = {}
        self.round: Round | None = None
        self.adopted: Finished | None = None
        self.acks: dict[PeerId, Finished] = {}
        self.commit: Commit | None = None
        self._adopted_commit = False
        self._opening = Opening(stamp, ballot, group_size, numbers)
        self._held_at = now
        self._orders = Orders(stamp, ballot, view, idle_s=idle_s, now=now)
        self._progress = Progress()
        self._level_at = now
        self._dispute = Dispute(view.me, patience_s=view.timers.suspect_s, lines=self._lines)
        self._left_out: set[PeerId] = set()    # of this step, see step.dispute
        self._opened_at = now
        self._first_ack_at: float | None = None
        self._told: dict[PeerId, Round] = {}
        self._prepared: set[PeerId] = set()
        self._early: dict[tuple[PeerId, int], Claim] = {}
        self._waited_s: dict[PeerId, float] = {}        # for the report of a mate that I hear, in all
        self._waiting_at: dict[PeerId, float] = {}      # when I last found that I wait for it
        self._level = False                    # had everybody reported when that was last looked at?
        self._findings = Findings(stamp.step, max_void=max_void)

    # ------------------------------------------------------------ messages

    def on_claim(self, peer: PeerId, claim: Claim, *, now: float) -> list[Action]:
        """Grant a free index, or say who owns it; silent when ballot, generation or phase is wrong (rule 3)."""
        if claim.ballot != self.ballot:
            return []
        if claim.index >= len(self.ledger.owners):
            return [Note("bad_claim", {"peer": peer, "index": claim.index})]
        if self.current_id is None and not self._everybody_reported(now):
            self._early[peer, claim.index] = claim
            return []
        if self.members.get(peer) != claim.generation:
            return []
        if claim.index in self.ledger.voided:
            return []
        held = self.ledger.owners[claim.index]
        if held is None:
            if self.current_id is not None:
                return []
            held = self.ledger.claim((peer, claim.generation), claim.index)
            self._orders.flow(now=now)
        if held == (peer, claim.generation):
            return [Send(peer, Granted(claim.stamp, self.ballot, claim.generation, claim.index))]
        if held[0] == peer:
            return []
        return [Send(peer, Moved(claim.stamp, self.ballot, claim.generation, claim.index, held[0]))]

    def on_report(self, peer: PeerId, report: Report, *, now: float) -> list[Action]:
        """Enter what a member holds; evict what cannot be; adopt finished sums (rules 10, 11, 14)."""
        if report.ballot != self.ballot:
            return []
        self._level = self._level and self.members.get(peer) == report.generation
        seen = self.view.get(peer)
        if seen is not None and seen.dead and peer != self.view.me:
            return []  # its last words, or a death that was an error: its next heartbeats will tell
        owner = (peer, report.generation)
        if peer in self._left_out:
            return [self._void(peer, report.generation)] if owner in self.ledger.closed else []
        known = self.members.get(peer)
        if known is not None and known != report.generation:
            if known.incarnation == report.generation.incarnation and known > report.generation:
                return []  # overtaken by a newer report
            self._evict(peer, known)
        if owner in self.ledger.closed and report.finished is None:
            return [Send(peer, Evicted(self.stamp, self.ballot, report.generation, void=False))]
        self._progress.hear(peer, report, now=now)
        self._orders.hear(peer, report)
        self._opening.measured(peer, report.line)
        self._dispute.hear(peer, report, now=now)
        self._findings.hear(peer, report)
        self._adopt(report)
        current = self.current_id
        if current is not None:
            return self._on_report_in_round(peer, report, current, now)
        if self.ledger.overlaps(peer, report.owned):
            self._evict(peer, report.generation)
            return [Send(peer, Evicted(self.stamp, self.ballot, report.generation, void=True))]
        if owner not in self.ledger.closed:
            self.ledger.enter(owner, report.owned)
        self.members[peer] = report.generation
        return []

    def on_release(self, peer: PeerId, release: Release, *, now: float) -> list[Action]:
        """A member does not hold what the round says it does: free that, open the round again (rule 10)."""
        if release.ballot != self.ballot or self.adopted or self.acks:
            return []
        if self.ledger.release((peer, release.generation), release.indexes):
            self.round = None
            self._orders.flow(now=now)
            return [Note("released", {"peer": peer, "indexes": sorted(release.indexes)})]
        return []

    # ------------------------------------------------------------ time

    def become_oldest(self, *, now: float) -> None:
        """The step before was applied: from now on rounds are opened, and idle indexes ordered."""
        self.oldest, self._level_at = True, now
        self._orders.flow(now=now)

    def advance(self, *, now: float, resend: bool) -> list[Action]:
        """Do whatever the state asks for; `resend` repeats what was already said (every tick, level-triggered)."""
        live = {self.view.me, *self._live(now)}
        self._level = False
        actions: list[Action] = self._evict_lost(live, now)
        actions += self._prepare(live, resend)
        if self.commit is not None:
            return actions + ([Broadcast(Committed(self.commit, self.stamp.restart))] if resend else [])
        actions += self._settle_dispute(now)
        if not self._everybody_reported(now):
            actions += self._leave_silent(now)
            if not self._everybody_reported(now):
                return actions
        self._waiting_at = {}
        self._waited_s = {peer: waited_s for peer, waited_s in self._waited_s.items() if peer not in self.members}
        early, self._early = self._early, {}
        for (peer, _), claim in early.items():
            actions += self.on_claim(peer, claim, now=now)
        if self.adopted and not self.acks and now - self._held_at > 2 * self.view.timers.suspect_s:
            # Whoever held the adopted sum is gone (A6): rebuild from the ledger.
            self.adopted, self._adopted_commit, self.round, self._held_at = None, False, None, now
        if self.current_id is None and self.oldest:
            actions += self._findings.void(self.ledger, self.members.keys())
            if self._findings.halted:
                return actions
            actions += self._evict_laggards(now)
            if not self.ledger.complete:
                actions += self._orders.give(
                    self.ledger, sorted(self.members), self._findings.found_by, self._opening.spares, now=now
                )
            elif not self._laggards():
                actions += self._open_round(now)
        if self.current_id is not None:
            actions += self._say_round(resend)
            actions += self._try_commit()
        return actions

    @property
    def claiming(self) -> bool:
        """Are free indexes claimed, by members that have all reported?

        Then nothing follows from one claim or report that could not wait for a tick, and what it costs must not grow
        with the number of members.
        """
        to_do = self.ledger.complete or self.ledger.freed or self._findings.found_by
        return self._level and self.current_id is None and not to_do

    @property
    def current_id(self) -> RoundId | None:
        """The sum everybody should end up with: the adopted one, else that of the open round."""
        if self.adopted is not None:
            return self.adopted.id
        return self.round.id if self.round else None

    def waits(self, now: float) -> list[tuple[PeerId, str]]:
        """Whom the step waits for here, and why, in words. Who holds up an open round its members know better."""
        if self.commit is not None or (self.current_id is not None and not self.acks):
            return []
        if self.acks:
            return [(peer, "has not got the sum") for peer in sorted(self.members.keys() - self.acks.keys())]
        silent = sorted({*self._waited_for(now)} - self.members.keys() - self._left_out)
        return [(peer, "does not report") for peer in silent] + [(peer, "is behind") for peer in self._laggards()]

    # ------------------------------------------------------------ inside

    def _everybody_reported(self, now: float) -> bool:
        """Rule 14: nothing is granted or opened before every live member has reported.

        Whoever is new is heard by a heartbeat, after which the keeper advances: until then the last answer stands.
        """
        if not self._level:
            self._level = {self.view.me, *self._waited_for(now)} - self._left_out <= self.members.keys()
        return self._level

    def _waited_for(self, now: float) -> list[PeerId]:
        """Live mates whose report I wait for, or have: who sits out may report, and nobody waits for it."""
        return [
            peer for peer in self._live(now) if peer in self.members or not self._strikes.sits(peer, now=now)
        ]

    def _leave_silent(self, now: float) -> list[Action]:
        """M11: go on without mates that are heard and do not report, after a long silence; at once without those whom I
        cannot call, if most of those who are here have reported.

        They may be behind a firewall, and hear nothing of me; or they may be hostile. Only the time counts in which
        they are heard: whoever was cut off does not get a strike for it when it is back.
        """
        awaited, timers = self._waited_for(now), self.view.timers
        missing = [peer for peer in awaited if peer not in self.members and peer not in self._left_out]
        for peer, at in self._waiting_at.items():
            self._waited_s[peer] = self._waited_s.get(peer, 0.0) + now - at
        self._waiting_at = {peer: now for peer in missing if self.view.alive(peer, now=now)}
        most = 2 * len(self.members) > 1 + len(awaited)
        actions: list[Action] = []
        for peer in missing:
            called, waited_s = self.view.answers(peer, now=now), self._waited_s.get(peer, 0.0)
            if waited_s <= timers.long_silence_s and (called or not most):
                continue
            reason = "does not report" if called else "nobody here can connect to it"
            if called:  # to be behind a firewall costs nobody time
                actions += self._strikes.strike(peer, reason, cost_s=waited_s, now=now)
            self._left_out.add(peer)
            self._waiting_at.pop(peer, None)
            self._level = False
            actions.append(self._left(peer, reason))
        return actions

    def _live(self, now: float) -> list[PeerId]:
        version = self.stamp.step
        return [
            peer for peer, seen in self.view.mates()
            if seen.synced and self._is_open_at(seen) and not self.view.lost(peer, version, now=now)
        ]

    def _is_open_at(self, seen: Seen) -> bool:
        """Does this mate have the weights that the step is computed on?"""
        of = self.stamp.step
        if not self._delay:
            return seen.version == of and seen.chain == self.stamp.chain
        return (seen.version, seen.before) == (of, self.stamp.chain) or (
            (seen.version, seen.chain) == (of - 1, self.stamp.chain)
        )

    def _evict(self, peer: PeerId, generation: Generation) -> None:
        self._opening.lost(peer, self.ledger.of(peer))
        self.ledger.evict((peer, generation))
        self.members.pop(peer, None)
        self._level = False
        self.acks.pop(peer, None)
        self._told.pop(peer, None)
        self._prepared.discard(peer)
        self._progress.forget(peer)
        self._dispute.forget(peer)
        if not self.acks:
            self.round = None

    def _evict_lost(self, live: set[PeerId], now: float) -> list[Action]:
        actions: list[Action] = []
        for peer, generation in list(self.members.items()):
            if peer == self.view.me:
                continue
            if peer not in live and self.view.lost(peer, self.stamp.step, now=now):
                seen = self.view.get(peer)
                reason = "dead" if seen is None or seen.dead else "silent"
            elif self._stalled(peer, now):
                reason = "stalled"
            else:
                continue
            self._drop(peer, generation)
            actions.append(Note("evicted", {"peer": peer, "reason": reason, "step": self.stamp.step}))
        return actions

    def _laggards(self) -> list[PeerId]:
        """Members that have not applied the step before: they count, but cannot contribute yet."""
        if not self._delay:
            return []
        found = ((peer, self.view.get(peer)) for peer in self.members)
        return [peer for peer, seen in found if seen is not None and seen.version < self.stamp.step]

    def _evict_laggards(self, now: float) -> list[Action]:
        """Go on without a laggard that has given up its sums for newer state, or stays where it is for very long."""
        laggards = self._laggards()
        if not laggards:
            self._level_at = now
            return []
        late = now - self._level_at > self.view.timers.long_silence_s
        actions: list[Action] = []
        for peer in laggards:
            seen, generation = self.view.get(peer), self.members[peer]
            if late or seen is None or not seen.synced:
                self._evict(peer, generation)
                actions.append(self._left(peer, "behind"))
            if late:
                self._left_out.add(peer)  # it reports again and would own its indexes again: it may fetch the sum
                actions.append(self._void(peer, generation))
        return actions

    def _drop(self, peer: PeerId, generation: Generation) -> None:
        if self.current_id is not None and set(self.acks) - {peer}:
            # The sum is safe elsewhere: nothing has to be executed again.
            self.members.pop(peer)
            self.acks.pop(peer, None)
        else:
            self._evict(peer, generation)

    def _settle_dispute(self, now: float) -> list[Action]:
        """Rule 12: go on without who holds up the round, by its members' word or, once there is a sum, by the clock."""
        alive = {self.view.me, *(peer for peer, seen in self.view.mates() if not seen.dead)}
        self._left_out = self._left_out & alive if self.members else set()  # nobody may be all that is left
        if self.acks:
            return self._leave_late(now)
        self._first_ack_at = None
        if self.round is None or self.adopted is not None:
            return []
        match self._dispute.verdict(self._opening.circles(self.round, self.members), now=now):
            case Leave(peer, reason, waits_for) if len(self.members) > 1:
                self._lines.broken(peer, waits_for, step=self.stamp.step)
                generation = self.members[peer]
                self._left_out.add(peer)
                self._drop(peer, generation)
                return [self._void(peer, generation), self._left(peer, reason)]
            case Again():
                self.round = None
                self._opening.turn()
                return [Note("cut_again", {"step": self.stamp.step})]
        return []

    def _leave_late(self, now: float) -> list[Action]:
        whole_at = self._first_ack_at = self._first_ack_at or now
        took_s = whole_at - self._opened_at if self.adopted is None else self.view.timers.long_silence_s / 2
        if now - whole_at <= max(_LATE_S, _LATE * took_s):
            return []
        late = sorted(self.members.keys() - self.acks.keys())
        self._left_out.update(late)  # they may fetch it in their own time
        self.members = {peer: generation for peer, generation in self.members.items() if peer in self.acks}
        return [self._left(peer, "late") for peer in late]

    def _left(self, peer: PeerId, reason: str) -> Note:
        return Note("evicted", {"peer": peer, "reason": reason, "step": self.stamp.step})

    def _void(self, peer: PeerId, generation: Generation) -> Send:
        return Send(peer, Evicted(self.stamp, self.ballot, generation, void=True))

    def _stalled(self, peer: PeerId, now: float) -> bool:
        """Heartbeats but no compute for very long. In an open round too, which waits until all have summed theirs."""
        waited = not self.acks and self.adopted is None and bool(self.ledger.of(peer))
        return waited and self._progress.still_s(peer, now=now) > 4 * self.view.timers.long_silence_s

    def _adopt(self, report: Report) -> None:
        """A finished sum beats an unfinished round; a committed one beats all (rule 14)."""
        finished = report.finished
        if finished is None:
            return
        committed = report.commit is not None and report.commit.id == finished.id
        if committed:
            if not self._adopted_commit or self.adopted is None or finished.id > self.adopted.id:
                if self.adopted is None or self.adopted.id != finished.id:
                    self.acks = {}
                self.adopted, self._adopted_commit = finished, True
        elif not self._adopted_commit and (self.adopted is None or finished.id > self.adopted.id):
            if self.round is not None and (self.acks or self.round.id == finished.id):
                return
            self.adopted, self.acks, self.round = finished, {}, None

    def _on_report_in_round(self, peer: PeerId, report: Report, current: RoundId, now: float) -> list[Action]:
        finished = report.finished
        if finished is not None and finished.id == current:
            self.acks[peer] = finished
            self._held_at = now
        else:
            self.acks.pop(peer, None)
        if self.round and not self.adopted and not self.acks and self.ledger.overlaps(peer, report.owned):
            self._evict(peer, report.generation)
            return [Send(peer, Evicted(self.stamp, self.ballot, report.generation, void=True))]
        self.members[peer] = report.generation
        return []

    def _prepare(self, live: set[PeerId], resend: bool) -> list[Action]:
        """live: who is left out, too, or it would stand itself."""
        fresh = live if resend else live - self._prepared
        self._prepared |= live
        prepare = Prepare(self.stamp, self.ballot, self.ledger.given() if fresh else NONE)
        return [Send(peer, prepare) for peer in sorted(fresh)]

    def _open_round(self, now: float) -> list[Action]:
        apart = self._lines.apart(self.members, step=self.stamp.step)
        self.round = self._opening.open(self.members, self.ledger, apart)
        self._told, self._opened_at = {}, now
        self._dispute.opened(self.round.id, now=now)
        reason = left_alone(self.view, self.stamp, self.members, now=now)
        return [] if reason is None else [Note("averaged_alone", {"step": self.stamp.step, "reason": reason})]

    def _say_round(self, resend: bool) -> list[Action]:
        holders = tuple(sorted(self.acks))
        if self.adopted is not None:
            base = Round(self.stamp, self.ballot, self.adopted.id, (), tuple(sorted(self.members)), holders)
        else:
            assert self.round is not None
            base = self.round
            if holders:
                # After the first ack a round is never aborted: whoever lacks the sum fetches it (rule 16).
                base = replace(base, holders=holders)
        actions: list[Action] = []
        for peer in sorted(self.members):
            if peer in self.acks:
                continue
            told = self._told.get(peer)
            # A member of the running exchange needs no word that others finished first, unless it lags a tick behind.
            same = told is not None and told.id == base.id and (told.holders != () or peer in base.receivers)
            if resend or not same:
                self._told[peer] = base
                actions.append(Send(peer, base))
        return actions

    def _try_commit(self) -> list[Action]:
        me = self.view.me
        if not self.members or not {*self.members, *({me} - self._left_out)} <= self.acks.keys():
            return []
        self.commit, differing = agreed(self.stamp, self.acks, me)
        notes: list[Action] = []
        if differing:
            notes.append(Note("digest_differs", {"peers": differing, "round": str(self.commit.id)}))
        return [*notes, Broadcast(Committed(self.commit, self.stamp.restart))]
