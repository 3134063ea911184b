"""The keeper of one stage, step and ballot: whom it waits for, grants and leaves out: M7, M11, M12, M16."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from model_rules import Ballot, Order, Peer, Report, Round, Sum

if TYPE_CHECKING:
    from model_member import Member

Owner = tuple[Peer, int]
MOST_GENERATIONS = 2
"""Of one member in one step: who begins again more often is left out."""


@dataclass(slots=True)
class Keeper:
    """One term of office of `of`."""

    of: Member
    ballot: Ballot
    ledger: dict[int, Owner] = field(default_factory=dict)
    granted_at: dict[int, int] = field(default_factory=dict)
    members: dict[Peer, int] = field(default_factory=dict)
    reports: dict[Peer, Report] = field(default_factory=dict)
    moved_at: dict[Peer, int] = field(default_factory=dict)
    expected_since: dict[Peer, int] = field(default_factory=dict)
    left_out: set[Peer] = field(default_factory=set)
    guilty: set[Peer] = field(default_factory=set)
    closed: dict[Peer, set[int]] = field(default_factory=lambda: defaultdict(set))
    round: Round | None = None
    rounds: int = 0
    opened_at: int = 0
    stood_at: int = 0
    only_new_at: int | None = None
    alone: tuple[Peer, int] | None = None
    acked_by: set[Peer] = field(default_factory=set)
    acked_at: int | None = None
    lacks: set[Peer] = field(default_factory=set)

    # ------------------------------------------------------------ reports

    def hear(self, peer: Peer, report: Report) -> None:
        """Enter what a member holds; close its generation where that cannot be."""
        of = self.of
        if not report.whole:
            last = self.reports.get(peer)
            if last is None or (last.generation, last.revision) != (report.generation, report.revision):
                self.lacks.add(peer)
                return
            report = replace(last, missing=report.missing, round=report.round)
        self.lacks.discard(peer)
        if peer in self.left_out - self.guilty and peer not in of.opinions.convicted and not self._majority():
            self.left_out.discard(peer)  # below a majority nobody is left out for being late
        if peer in self.left_out or peer in of.opinions.convicted:
            if report.granted:
                self.closed[peer].add(report.generation)
            return
        if report.generation in self.closed[peer]:
            return
        known = self.members.get(peer)
        if known is not None and known != report.generation:
            self.drop(peer)
            if len(self.closed[peer]) > MOST_GENERATIONS and peer != of.id:
                self._leave_out(peer, of.world.now - self.opened_at if self.opened_at else of.clock.suspect)
                return
        owner = (peer, report.generation)
        possible = report.granted <= set(range(of.world.microbatches))
        if not possible or any(self.ledger.get(i, owner) != owner for i in report.granted):
            self.closed[peer].add(report.generation)
            self.members.pop(peer, None)
            self._free(peer)
            return
        if self.round is None:
            for index in report.granted:
                self.ledger[index] = owner
                self.granted_at.setdefault(index, of.world.now)
        before = self.reports.get(peer)
        if before is None or before.summed != report.summed:
            self.moved_at[peer] = of.world.now
        self.members[peer], self.reports[peer] = report.generation, report

    def drop(self, peer: Peer) -> None:
        """It is no member any more, what it owned is free. A round that most have acked goes on without it."""
        if peer in self.members:
            self.closed[peer].add(self.members.pop(peer))
        self.reports.pop(peer, None)
        if self.acked_at is None:
            self._free(peer)
            self.round = None

    def _free(self, peer: Peer) -> None:
        self.ledger = {index: owner for index, owner in self.ledger.items() if owner[0] != peer}

    def _leave_out(self, peer: Peer, cost: float) -> None:
        self.left_out.add(peer)
        self.guilty.add(peer)
        self.of.charge(peer, cost)
        self.drop(peer)

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        """Whatever the state asks for."""
        of = self.of
        self.hear(of.id, of.report())
        mates = self._mates()
        self._drop_lost()
        waited_for = self._wait_for(mates)
        may_grant = not waited_for and self._majority()
        if may_grant and of.stage not in of.commits:
            if self.round is None:
                self._grant()
                self._take_back()
                self._open()
            else:
                self._watch_round()
        self._tell(mates, may_grant)

    def _majority(self) -> bool:
        """More than half of the live roster has reported; for TL after I stood, of those who report at all."""
        of = self.of
        idle = frozenset[Peer]()
        if of.rules.dormant and of.world.now - self.stood_at > of.clock.long_silence // 2:
            idle = frozenset(of.opinions.live(of.stage) - set(self.members))
            if len(self.members) == 1:
                idle = frozenset()
        return of.opinions.enough(set(self.members), of.stage, idle)

    def newcomer(self, peer: Peer) -> bool:
        """Has it yet to contribute?"""
        of = self.of
        roster = of.opinions.roster(of.stage)
        return of.rules.contributors and bool(roster) and peer not in roster and peer != of.id

    def _mates(self) -> set[Peer]:
        of = self.of
        if of.rules.leave_out:
            return {
                peer
                for peer, beat in of.opinions.beats.items()
                if of.opinions.vouch(peer) and (beat.version, beat.chain) == (of.version, of.chain)
            }
        return {
            peer
            for peer, beat in of.opinions.beats.items()
            if beat.stage == of.stage
            and beat.synced
            and beat.version == of.version
            and of.opinions.recently(peer)
            and peer not in of.opinions.refused
        }

    def _drop_lost(self) -> None:
        """Definitely dead; or not alive while most of the live roster is; or lost."""
        opinions, of = self.of.opinions, self.of
        live = opinions.live(of.stage)
        heard = 2 * sum(opinions.alive(peer) for peer in live) > len(live)
        for peer in list(self.members):
            if peer != of.id and (
                peer in opinions.refused or (heard and not opinions.alive(peer)) or opinions.lost(peer)
            ):
                self.drop(peer)

    def _wait_for(self, mates: set[Peer]) -> set[Peer]:
        """Who has yet to report before anything is granted (M11). Who is late is left out."""
        of, now = self.of, self.of.world.now
        for peer in mates:
            self.expected_since.setdefault(peer, now)
        waited_for = {
            peer for peer in mates if peer not in self.left_out and peer not in self.members and not self.newcomer(peer)
        }
        if not of.rules.leave_out:
            return waited_for
        patience = 2 * of.clock.suspect
        late = {peer for peer in waited_for if now - self.expected_since[peer] > min(patience, of.credit(peer))}
        for peer in late:
            self.left_out.add(peer)
            of.charge(peer, now - self.expected_since[peer])
        return {peer for peer in waited_for - late if not of.opinions.sits_out(peer, of.version)}

    def _grant(self) -> None:
        """Free microbatches to whoever has fewest; to a newcomer one, to who sits out none while others are there."""
        of = self.of
        holds = Counter(peer for peer, _ in self.ledger.values())
        fit = [peer for peer in self.members if not of.opinions.sits_out(peer, of.version) or peer == of.id]
        known = [peer for peer in fit if not self.newcomer(peer)] or fit
        strangers = self._on_trial([peer for peer in fit if peer not in known])
        for index in range(of.world.microbatches):
            if index in self.ledger:
                continue
            free = [peer for peer in strangers if not holds[peer] and not self.closed[peer]] or known
            peer = min(free, key=lambda peer: (holds[peer], of.world.shuffled(peer, index, of.version)))
            holds[peer] += 1
            self.ledger[index] = (peer, self.members[peer])
            self.granted_at[index] = of.world.now

    def _on_trial(self, newcomers: list[Peer]) -> list[Peer]:
        """Which newcomers are granted something, for a quarter of the step at the most.

        Who has contributed before goes on; of the others the first heard are first. As a whole they sit out for what
        newcomers have cost.
        """
        of = self.of
        earned = of.opinions.earned[of.stage]
        closed = of.rules.trials and of.opinions.sits_out("newcomers", of.version)
        found = [peer for peer in newcomers if earned[peer] or not closed]
        found.sort(key=lambda peer: (not earned[peer], of.opinions.first_heard[peer]))
        return found[: max(1, of.world.microbatches // 4)]

    def _take_back(self) -> None:
        """Who is granted and idle, and is what all wait for. A newcomer's is taken back at once (M16)."""
        of, now = self.of, self.of.world.now
        behind = [
            peer
            for peer, report in self.reports.items()
            if any(owner[0] == peer and index not in report.summed for index, owner in self.ledger.items())
        ]
        known = [peer for peer in behind if not self.newcomer(peer)]
        if self.alone is not None and [self.alone[0]] != known:
            peer, since = self.alone
            if now - since > of.slack():
                of.charge(peer, now - since, offence=False)
            self.alone = None
        if not behind:
            return
        if not known:
            self.only_new_at = now if self.only_new_at is None else self.only_new_at
            if now - self.only_new_at > of.median() / 4:
                for peer in behind:
                    self._refuse_newcomer(peer, now - self.only_new_at + of.median())
            return
        self.only_new_at = None
        if self.alone is None and len(known) == 1:
            self.alone = known[0], now
        patience = of.patience()
        for peer in known:
            since = max(
                self.moved_at.get(peer, now),
                *(at for index, at in self.granted_at.items() if self.ledger.get(index, ("", 0))[0] == peer),
            )
            if peer != of.id and now - since > min(patience, of.median() / 4 + of.credit(peer)):
                self._leave_out(peer, now - since)
                self.alone = None

    def _refuse_newcomer(self, peer: Peer, cost: float) -> None:
        of = self.of
        self.left_out.add(peer)
        self.guilty.add(peer)
        self.drop(peer)
        if of.rules.trials:
            of.opinions.sitting.charge(
                "newcomers", cost, others=of.others(), step=of.version, now=of.world.now, limit=of.rules.sit_most
            )
            of.opinions.sitting.times["newcomers"] = 0  # one that fails says nothing of the next
        of.charge(peer, cost)

    def _open(self) -> None:
        """Everything is summed: a round of those who contribute or are waited for; others fetch the sum."""
        of, world = self.of, self.of.world
        sets: dict[Peer, tuple[int, set[int]]] = {}
        for index, (peer, generation) in self.ledger.items():
            sets.setdefault(peer, (generation, set()))[1].add(index)
        for peer, report in self.reports.items():
            mine = sets.get(peer, (0, set()))[1]
            if not mine == report.summed == report.granted:
                return
        if len(self.ledger) < world.microbatches:
            return
        self.rounds += 1
        reducers = frozenset(
            peer for peer in self.members if not (self.newcomer(peer) or of.opinions.sits_out(peer, of.version))
        )
        self.round = Round(
            Sum(of.incarnation * 1000 + self.rounds, self.ballot),
            self.ballot,
            {peer: (generation, frozenset(indexes)) for peer, (generation, indexes) in sets.items()},
            frozenset(self.members),
            reducers | {of.id},
        )
        self.opened_at, self.acked_at = world.now, None

    def _watch_round(self) -> None:
        """Publish the commit, or end the wait for who is late (M7), or leave out who holds up the round (M16)."""
        of, now = self.of, self.of.world.now
        assert self.round is not None
        sum_ = self.round.sum
        have = {peer for peer, report in self.reports.items() if peer in self.members and report.sum == sum_}
        if of.opinions.enough(have, of.stage, of.dormant(of.stage)) and self.acked_at is None:
            self.acked_at = now
        late = [
            peer
            for peer in self.members
            if peer not in have and not self.newcomer(peer) and not of.opinions.sits_out(peer, of.version)
        ]
        others_late = [peer for peer in late if peer != of.id]
        if self.acked_at is not None:
            for peer in have - self.acked_by:
                if now - self.acked_at > of.slack() and not of.opinions.sits_out(peer, of.version):
                    of.charge(peer, now - self.acked_at, offence=False)
            self.acked_by = have
            if others_late and of.rules.wait_for_all and now - self.acked_at <= of.late_patience():
                return
            for peer in others_late:
                missing = self.reports[peer].missing
                guilty = of.disputed(peer, min(missing)) if len(missing) == 1 else peer
                of.charge(guilty, now - self.acked_at)
            certificate = frozenset(ack for ack in of.acks[of.stage].values() if ack.sum == sum_)
            if of.valid(of.stage, sum_, certificate) and not (of.lie and "nocommit" in of.lie.modes):
                of.commits[of.stage] = (sum_, certificate)
            return
        waited = now - self.opened_at
        if self._refuse_in_round(have, waited):
            return
        if waited > of.round_patience() and set(late):
            guilty = self._guilty(sum_, late)
            if guilty is None:
                self.opened_at = now
            else:
                self._leave_out(guilty, waited)

    def _refuse_in_round(self, have: set[Peer], waited: float) -> bool:
        """Newcomers, and others of little credit, whose parts do not come: those that are named, else all of them."""
        of, round_ = self.of, self.round
        assert round_ is not None
        usual = of.clock.exchange + 3 * max(of.clock.delays) + 1
        doubtful = {
            peer
            for peer in round_.sets
            if peer not in have and waited > usual + (0 if self.newcomer(peer) else of.credit(peer))
        }
        named = {x for peer, report in self.reports.items() if not self.newcomer(peer) for x in report.missing}
        guilty = doubtful & named or doubtful
        if guilty == doubtful and not any(self.newcomer(peer) for peer in guilty) and waited <= of.round_patience():
            return False
        for peer in sorted(guilty - {of.id}):
            if self.newcomer(peer):
                self._refuse_newcomer(peer, waited + of.median())
            else:
                self._leave_out(peer, waited)
        return bool(guilty - {of.id})

    def _guilty(self, sum_: Sum, late: list[Peer]) -> Peer | None:
        """Who holds up the round, by its members' words: named by most, or complaining most, or not taking part."""
        reports = {peer: self.reports[peer] for peer in self.members}
        named = Counter(other for report in reports.values() for other in report.missing if other in self.members)
        idle = sorted(p for p, report in reports.items() if report.round != sum_ and report.sum != sum_)
        lacking = sorted(late)
        suspect: Peer | None = None
        if named:
            top, times = named.most_common(1)[0]
            by_most = 2 * times > len(self.members) - 1 and (times > 1 or len(self.members) == 2 or top in idle)
            loudest = max(sorted(reports), key=lambda peer: len(reports[peer].missing))
            if by_most:
                suspect = top
            elif len(reports[loudest].missing) == 1:
                suspect = self.of.disputed(loudest, top)  # one's word against one's
            else:
                suspect = loudest
        elif idle:
            suspect = idle[0]
        elif lacking:
            suspect = lacking[0]
        if suspect == self.of.id:
            suspect = next((peer for peer in lacking if peer != self.of.id), None)
        return suspect

    def _tell(self, mates: set[Peer], may_grant: bool) -> None:
        of = self.of
        deny = frozenset(
            peer for peer, report in self.reports.items() if self.round and peer in self.members and report.sum is None
        )
        for peer in sorted(mates | set(self.members) | {of.id}):
            generation = self.members.get(peer)
            mine = frozenset(i for i, owner in self.ledger.items() if owner == (peer, generation))
            joins = self.round is not None and peer in self.members and peer in self.round.receivers
            order: Order | None = Order(
                version=of.version,
                chain=of.chain,
                ballot=self.ballot,
                heard=peer in self.members or peer in self.left_out,
                closed=frozenset(self.closed[peer]),
                generation=generation,
                grants=mine if may_grant else frozenset(),
                round=self.round if joins else None,
                deny=deny,
                whole=of.rules.asks and peer in self.lacks,
                restart=of.restart,
            )
            if of.lie:
                order = of.lie.order(of, peer, order)
            if order is None:
                continue
            if peer == of.id:
                of.obey(peer, order)
            else:
                of.say(peer, order)
