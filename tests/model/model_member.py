"""One replica of one stage: its part in a step, its acks, certificates, views and its place among the others.

The rules of the design by their numbers (M2 to M19); what they are for is said there. What it thinks of others is in
`model_opinions`, what it does as keeper in `model_keeper`, how it gets level again in `model_lag`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from model_keeper import Keeper
from model_lag import Lag
from model_opinions import Opinions
from model_rules import (
    Ack,
    Ballot,
    Beat,
    Certificate,
    Commit,
    Message,
    Order,
    Peer,
    Report,
    Round,
    Sitting,
    Sum,
    digest,
    most,
)

if TYPE_CHECKING:
    from model_liars import Lie
    from model_network import World


class Member:
    """What is of one step is set anew by `begin`, what is of one process by `start`; the rest is on disk."""

    def __init__(self, world: World, id_: Peer, stage: int, lie: Lie | None = None, *, synced: bool = True) -> None:
        self.world, self.id, self.stage, self.lie = world, id_, stage, lie
        self.rules, self.clock = world.rules, world.clock
        self.up, self.paused_until, self.slow, self.incarnation = True, 0, 1, 0
        self.synced, self.version, self.chain, self.generation = synced, 0, b"", 0
        self.restart, self.disk = 0, 0
        self.sitting = Sitting(self.rules, self.clock)
        self.keeper_sitting = Sitting(self.rules, self.clock) if self.rules.keeper_sit_apart else self.sitting
        self.convicted: set[Peer] = set()
        self.disputes: Counter[Peer] = Counter()
        self.start()

    def start(self) -> None:
        """A process begins: it knows nobody."""
        self.opinions = Opinions(self.world, self.id, self.stage, self.sitting, self.convicted)
        self.lag = Lag(self)
        self.signed: dict[tuple[Peer, int, int, object], Sum] = {}
        self.durations: deque[int] = deque(maxlen=9)
        self.busy: deque[int] = deque(maxlen=9)
        self.last_ack: Ack | None = None
        self.last_commits: dict[int, Commit] = {}
        self.last_sum: tuple[int, Sum] | None = None
        self.ticked = self.world.now
        self.kept_by: tuple[Peer, int] = ("", -1)
        self.lost_here = 0.0
        self.revision = self.incarnation << 20  # of two lives no revision is one
        self.told: Report | None = None
        self.asked = False
        self._said: dict[Peer, tuple[Message, int]] = {}
        self._beat_said: tuple[object, int] = (None, -(10**9))
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        now = self.world.now
        self.begun = self.view_at = self.answered_at = now
        self.promised: Ballot | None = None
        self.granted: set[int] = set()
        self.due: dict[int, int] = {}
        self.summed: set[int] = set()
        self.granted_at: int | None = None
        self.sum: Sum | None = None
        self.round: Round | None = None
        self.joined_at = 0
        self.missing: frozenset[Peer] = frozenset()
        self.fetch_at: int | None = None
        self.commits: dict[int, Commit] = {}
        self.acks: dict[int, dict[Peer, Ack]] = {k: {} for k in range(self.world.stages)}
        self.certified_at: dict[tuple[int, Sum], int] = {}
        self.half_at: dict[int, int] = {}
        self.first_ack_at: dict[int, int] = {}
        self.locked_at: int | None = None
        self.lost_sums: set[Sum] = set()
        self.lost_at: int | None = None
        self.view, self.jitter = 0, 1.0
        self.keeper: Keeper | None = None
        self.applying: int | None = None

    # ------------------------------------------------------------ patience

    def median(self) -> float:
        """How long a step takes here, when nothing holds it up: the lower third, so that a bad time is forgotten.

        Never more than my own share explains: all patience grows with it, and who drips would stretch it step by step.
        """
        if not self.durations:
            return float(self.clock.suspect)
        took = sorted(self.durations)[len(self.durations) // 3]
        if not self.busy or not self.rules.own_pace:
            return float(took)
        mine = sorted(self.busy)[len(self.busy) // 2]
        return float(min(took, max(self.clock.suspect / 2, 6 * mine)))

    def patience(self) -> float:
        """With an owner that shows no progress."""
        if self.rules.short_patience:
            return max(2 * self.clock.suspect, 2 * self.median()) * 2 ** min(self.view, 5)
        return 6 * self.clock.suspect * 2 ** min(self.view, 5)

    def round_patience(self) -> float:
        """With a round that is not whole."""
        if self.rules.short_patience:
            return max(self.clock.suspect, self.median())
        return 3 * self.clock.suspect

    def late_patience(self) -> float:
        """With acks that most have given already."""
        return self.clock.suspect if self.rules.short_patience else 2 * self.clock.suspect

    def credit(self, peer: Peer) -> float:
        """How long it is waited for at the most: what it has contributed to, over what it may cost all keepers."""
        earned = self.opinions.earned[self.stage][peer]
        if not self.rules.credit or not self.opinions.roster(self.stage):
            return 1e9
        return earned * self.median() / (self.rules.sit_factor * max(self.others(), 1))

    def disputed(self, complains: Peer, named: Peer) -> Peer:
        """One says that nothing comes from the other. Whoever was in more such pairs is left out."""
        self.disputes[complains] += 1
        self.disputes[named] += 1
        return complains if self.disputes[complains] > self.disputes[named] else named

    def slack(self) -> float:
        """What a step may lose for one member's sake before that is charged."""
        return max(2.0, self.median() / 4)

    def others(self) -> int:
        """Of the live roster."""
        return len(self.opinions.live(self.stage) - {self.id})

    def charge(self, peer: Peer, cost: float, *, kept: bool = False, offence: bool = True) -> None:
        """It has cost that much time: it sits out (M16). offence: longer with each repetition; else it was slow."""
        if peer == self.id:
            return
        sitting = self.keeper_sitting if kept else self.sitting
        limit = self.rules.sit_keeper_most if kept else self.rules.sit_most
        others = 1 if kept else self.others()  # that it kept in vain everybody saw
        sitting.charge(peer, cost, others=others, step=self.version, now=self.world.now, limit=limit, offence=offence)
        self.world.charged(self, peer, cost)

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        """One tick of this replica's life."""
        now = self.world.now
        self.opinions.probe()
        if self.lie:
            self.lie.prepare(self)
            if self.lie.only_beats:
                self._send_beats()
                return
        self.lag.wake(since=self.ticked)
        self.ticked = now
        if self.synced:
            self.work()
        else:
            self.lag.join()
        self._send_beats()

    def _send_beats(self) -> None:
        news = (
            self.version,
            self.chain,
            self.synced,
            self.sum,
            frozenset(self.commits),
            self.view,
            len(self.convicted),
            self.passes_over(),
        )
        said, at = self._beat_said
        if news == said and self.world.now - at < self.clock.beat:
            return
        self._beat_said = (news, self.world.now)
        own = self.beat()
        for peer in self.world.members:
            if peer != self.id:
                self.world.send(self.id, peer, self.lie.beat(self, peer) if self.lie else own)

    def say(self, peer: Peer, message: Order | Report) -> None:
        """Tell it what it does not know yet, and all of it again with every heartbeat."""
        said, at = self._said.get(peer, (None, 0))
        if said == message and self.world.now - at < self.clock.beat:
            return
        self._said[peer] = (message, self.world.now)
        self.world.send(self.id, peer, message)

    def my_ack(self) -> Ack | None:
        """M5."""
        if self.sum is None:
            return None
        known = {peer for peer in self.world.of_stage(self.stage) if self.opinions.vouch(peer)}
        return Ack(self.id, self.stage, self.version, self.sum, frozenset(known))

    def beat(self) -> Beat:
        """My heartbeat."""
        return Beat(
            stage=self.stage,
            version=self.version,
            chain=self.chain,
            synced=self.synced,
            view=self.view,
            incarnation=self.incarnation,
            ack=self.my_ack(),
            last_ack=self.last_ack,
            commits=dict(self.commits),
            last_commits=dict(self.last_commits),
            convicted=frozenset(self.convicted),
            restart=self.restart,
            disk=self.disk,
            wants_back=self.lag.wants_back,
            passes_over=self.passes_over(),
            serves=self.synced or self.lag.keeps_old,
        )

    # ------------------------------------------------------------ messages

    def receive(self, peer: Peer, message: Message) -> None:
        """Anything from anybody."""
        self.opinions.hear(peer)
        if isinstance(message, Beat):
            self._hear_beat(peer, message)
            return
        if not self.synced or self.applying is not None or message.restart != self.restart:
            return
        if isinstance(message, Order):
            self.obey(peer, message)
        elif (
            self.keeper
            and message.ballot == self.keeper.ballot
            and ((message.version, message.chain) == (self.version, self.chain))
        ):
            self.keeper.hear(peer, message)

    def _hear_beat(self, peer: Peer, beat: Beat) -> None:
        before = self.opinions.beats.get(peer)
        if before is not None and before.incarnation != beat.incarnation and self.keeper:
            self.keeper.drop(peer)
        self.opinions.beats[peer] = beat
        self.convicted |= beat.convicted & self.world.liars  # the proof comes along: only the guilty sign twice
        if beat.restart != self.restart:
            return
        for ack in (beat.ack, beat.last_ack):
            if ack is not None and ack.peer == peer:
                self.learn_ack(ack)
                if ack.step == self.version:
                    self.acks[ack.stage][peer] = ack
        for step, commits in ((beat.version, beat.commits), (beat.version - 1, beat.last_commits)):
            if step == self.version:
                for stage, commit in commits.items():
                    self._learn_commit(stage, commit)

    def learn_ack(self, ack: Ack) -> None:
        """Two words about one round convict (M15): anybody can check that."""
        key = (ack.peer, ack.stage, ack.step, (ack.sum.round, ack.sum.forged))
        if self.signed.setdefault(key, ack.sum) != ack.sum:
            self.convicted.add(ack.peer)

    def valid(self, stage: int, sum_: Sum, certificate: Certificate) -> bool:
        """Is it one (M6)?"""
        signers = {ack.peer for ack in certificate if (ack.stage, ack.step, ack.sum) == (stage, self.version, sum_)}
        return self.opinions.enough(signers, stage, self.dormant(stage))

    def dormant(self, stage: int) -> frozenset[Peer]:
        """Who of a stage is heard at this step, and has signed nothing TL after the first had."""
        acks = self.acks[stage]
        if not acks or not self.rules.dormant:
            return frozenset()
        since = self.first_ack_at.setdefault(stage, self.world.now)
        if self.world.now - since <= self.clock.long_silence:
            return frozenset()
        silent = self.opinions.live(stage) - set(acks)
        return frozenset(x for x in silent if self.opinions.version(x) >= self.version)

    def _learn_commit(self, stage: int, commit: Commit) -> None:
        sum_, certificate = commit
        for ack in certificate:
            self.learn_ack(ack)
        if stage not in self.commits and self.valid(stage, sum_, certificate) and sum_ not in self.lost_sums:
            self.commits[stage] = commit

    def obey(self, peer: Peer, order: Order) -> None:
        """A keeper's order: promise its ballot if it is my first (M13), take grants, join its round."""
        if (order.version, order.chain) != (self.version, self.chain) or order.ballot[2] != peer:
            return
        ballot, now = order.ballot, self.world.now
        if self.promised is None or ballot > self.promised:
            mine = ballot[0] == self.view and peer not in self.convicted and self.first() == peer
            if self.rules.only_my_views_first and not mine:
                return
            self.promised, self.answered_at, self.round = ballot, now, None
            if self.keeper and self.keeper.ballot != ballot:
                self.keeper = None
        if ballot != self.promised:
            return
        if order.heard:
            self.answered_at = now
        self.asked |= order.whole
        if self.generation in order.closed:
            self.generation += 1
            self.granted, self.summed, self.due, self.round = set(), set(), {}, None
            return
        if order.generation == self.generation and self.round is None:
            for index in sorted(order.grants - self.granted):
                self.granted_at = now if self.granted_at is None else self.granted_at
                self.granted.add(index)
                self.due[index] = now + self.world.rng.randint(*self.clock.work) * self.slow
        self._take_round(order)
        if order.adopt is not None and not self.rules.certified and self.sum is None:
            self.sum = order.adopt

    def _take_round(self, order: Order) -> None:
        offered, now = order.round, self.world.now
        if offered is None or self.round == offered:
            self.round = offered
            return
        mine = offered.sets.get(self.id, (self.generation, frozenset()))
        named = sorted(index for _, indexes in offered.sets.values() for index in indexes)
        if named != list(range(self.world.microbatches)) or mine != (self.generation, frozenset(self.summed)):
            return
        if self.summed != self.granted:
            return
        if self.stage in self.commits and self.commits[self.stage][0] != offered.sum:
            return
        if self.sum is not None and self.sum != offered.sum and self.rules.locks and not self._released(order):
            return
        self.round, self.joined_at, self.missing = offered, now, frozenset()

    def _released(self, order: Order) -> bool:
        """M10: I have acked another sum. At least half of the live roster lack it, or I have been asked for TL."""
        self.locked_at = self.world.now if self.locked_at is None else self.locked_at
        live = self.opinions.live(self.stage)
        deny = (order.deny - {self.id}) & live
        return 2 * len(deny) >= len(live) or self.world.now - self.locked_at > self.clock.long_silence

    # ------------------------------------------------------------ the step

    def work(self) -> None:
        """Sum, exchange, certify, fetch, apply; and see to it that somebody keeps."""
        now = self.world.now
        if self.applying is not None:
            if now >= self.applying:
                self._apply()
            return
        for index in [index for index, at in self.due.items() if at <= now]:
            if not (self.lie and self.lie.withholds(self, index)):
                self.summed.add(index)
                del self.due[index]
                if not self.due and self.granted_at is not None:
                    self.busy.append(now - self.granted_at)
                    self.granted_at = None
        self._exchange()
        self._certify()
        if self._fetch():
            self.applying = now + 1
            return
        self.lag.look()
        if self.applying is not None or not self.synced:
            return
        self._change_view()
        if self.keeper:
            self.keeper.tick()
        elif self.promised:
            report = self.report()
            answer = self.lie.report(self, report) if self.lie else report
            if answer is not None:
                self.say(self.promised[2], self.brief(answer) if self.rules.brief else answer)

    def report(self) -> Report:
        """To my keeper."""
        assert self.promised is not None
        return Report(
            self.version,
            self.chain,
            self.promised,
            self.generation,
            frozenset(self.granted),
            frozenset(self.summed),
            self.sum,
            self.missing,
            self.round.sum if self.round else None,
            self.restart,
        )

    def brief(self, report: Report) -> Report:
        """The same, without what it holds if the keeper has been told, and does not ask for it."""
        told, self.told = self.told, replace(report, missing=frozenset(), round=None)
        if told != self.told:
            self.revision += 1
        elif not self.asked:
            nothing = frozenset[int]()
            return replace(report, granted=nothing, summed=nothing, sum=None, whole=False, revision=self.revision)
        self.asked = False
        return replace(report, revision=self.revision)

    def _exchange(self) -> None:
        if self.round is None:
            return
        if self.sum == self.round.sum:
            self.missing = frozenset()
            return
        takes_part = {*self.round.sets, *self.round.reducers} - {self.id}
        self.missing = frozenset(peer for peer in takes_part if not self.world.part_came(peer, self, self.round))
        whole = not self.missing and self.world.now - self.joined_at >= self.clock.exchange
        if whole and self.promised == self.round.ballot:
            self.sum = self.round.sum
            self.world.made(self.round)

    def _certify(self) -> None:
        """Certificates out of acks that I heard myself (M7, M8)."""
        own = self.my_ack()
        if own is not None:
            self.acks[self.stage][self.id] = own
        for stage in range(self.world.stages):
            if stage in self.commits:
                continue
            by_sum: dict[Sum, set[Ack]] = {}
            for ack in self.acks[stage].values():
                by_sum.setdefault(ack.sum, set()).add(ack)
            for sum_, acks in sorted(by_sum.items()):
                if self.valid(stage, sum_, frozenset(acks)) and sum_ not in self.lost_sums:
                    self._certified(stage, sum_, frozenset(acks))
            if stage not in self.commits and self.rules.pairs:
                self._pair(stage, by_sum)

    def _certified(self, stage: int, sum_: Sum, acks: Certificate) -> None:
        now = self.world.now
        since = self.certified_at.setdefault((stage, sum_), now)
        wait = (2 if not self.rules.short_patience else 1) * self.clock.suspect
        if self.rules.short_patience:
            wait += self.clock.suspect // 2  # longer than a keeper waits for late acks
        if not self.rules.wait_for_all:
            wait = -1
        if now - since > wait:
            self.commits[stage] = (sum_, acks)
            if stage == self.stage and self.promised:
                self.charge(self.promised[2], now - since, kept=True)  # it kept, and published nothing

    def _pair(self, stage: int, by_sum: dict[Sum, set[Ack]]) -> None:
        """M8: of a live roster of two one ack suffices after TL, if the other is not heard at this step."""
        live, now = self.opinions.live(stage), self.world.now
        signers = {ack.peer for acks in by_sum.values() for ack in acks}
        sums = sorted(sum_ for sum_, acks in by_sum.items() if {ack.peer for ack in acks} & live)
        others = live - signers - {self.id}
        heard = any(self.opinions.alive(x) and self.opinions.version(x) == self.version for x in others)
        mine = self.id not in live or self.id in signers or stage != self.stage
        if len(live) != 2 or not sums or heard or not mine:
            self.half_at.pop(stage, None)
            return
        since = self.half_at.setdefault(stage, now)
        if now - since <= self.clock.long_silence:
            return
        if len(sums) > 1 and (self.world.liars or any(sum_.forged for sum_ in sums)):
            return  # two that differ: tokens and norms do not agree
        chosen = self.sum if stage == self.stage and self.sum in sums else sums[0]
        assert chosen is not None
        self.commits[stage] = (chosen, frozenset(by_sum[chosen]))

    def _fetch(self) -> bool:
        """My stage's committed sum: fetch it if I hold another (M9). True: all stages have committed, and I hold it."""
        if self.stage not in self.commits:
            return False
        now, sum_ = self.world.now, self.commits[self.stage][0]
        if self.sum != sum_:
            holders = [
                peer
                for peer in self.world.of_stage(self.stage)
                if peer != self.id and self.world.linked(self.id, peer) and self.world.serves(peer, self.version, sum_)
            ]
            if holders:
                self.fetch_at = now if self.fetch_at is None else self.fetch_at
                if now - self.fetch_at >= self.clock.exchange:
                    self.sum = sum_
            else:
                self._miss(sum_)
        return self.sum == sum_ and len(self.commits) == self.world.stages

    def _miss(self, sum_: Sum) -> None:
        """Nobody serves the committed sum. M10: all of the live roster, heard at this step, lack it for TL."""
        now = self.world.now
        self.fetch_at = None
        self.lost_at = now if self.lost_at is None else self.lost_at
        others = self.opinions.live(self.stage) - {self.id}
        here = all(self.opinions.alive(x) and self.opinions.version(x) == self.version for x in others)
        if here and now - self.lost_at > self.clock.long_silence:
            self.lost_sums.add(sum_)
            del self.commits[self.stage]
            self.lost_at = None

    def _apply(self) -> None:
        world, now = self.world, self.world.now
        sum_, certificate = self.commits[self.stage]
        if not self.lie:
            world.applied(self, sum_, full=most({ack.peer for ack in certificate}, self.opinions.roster(self.stage)))
        for stage, commit in self.commits.items():
            self.opinions.take_in(stage, commit)
        self.sitting.fade(now=now)
        self.keeper_sitting.fade(now=now)
        self._judge_keeper(now - self.begun)
        self.durations.append(now - self.begun)
        self.last_ack, self.last_commits, self.last_sum = self.my_ack(), dict(self.commits), (self.version, sum_)
        self.chain = digest(self.chain, sum_)
        self.version += 1
        self.generation += 1
        if self.version % world.disk_steps == 0:
            self.disk = self.version
        self.lag.stepped()
        self.begin()

    def _judge_keeper(self, took: int) -> None:
        """Who keeps and lets each step last is charged with what its term has lost; one stall is not its fault."""
        if self.promised is None or self.view > 0 or not self.rules.slow_keepers:
            return
        keeper, term = self.promised[2], self.version // self.clock.term_steps
        if (keeper, term) != self.kept_by:
            self.kept_by, self.lost_here = (keeper, term), 0.0
        self.lost_here += max(0.0, took - 1.5 * self.median())
        if self.lost_here > max(3 * self.clock.suspect, 4 * self.median()):
            self.charge(keeper, self.lost_here, kept=True)
            self.lost_here = 0.0

    # ------------------------------------------------------------ views

    def order(self) -> list[Peer]:
        """Who keeps, first to last, in my view."""
        roster = self.opinions.roster(self.stage)
        if not any(not self.opinions.lost(peer) for peer in roster):
            roster = set(self.opinions.live(self.stage))
        term = self.version // self.clock.term_steps
        order = sorted(roster or {self.id}, key=lambda peer: self.world.shuffled(term, peer))
        turn = self.view % len(order)  # each view has another first: nobody keeps twice in vain
        return order[turn:] + order[:turn]

    def _may_keep(self, peer: Peer, *, strict: bool) -> bool:
        if strict and self._passed_over(peer):
            return False
        if peer == self.id:
            return True
        now = self.world.now
        if peer not in self.opinions.beats and now - self.opinions.born <= self.clock.suspect:
            return True  # I have just started: it may well be there
        return self.opinions.vouch(peer) and abs(self.opinions.version(peer) - self.version) <= 1

    def passes_over(self) -> frozenset[Peer]:
        """Who has kept in vain, by what I saw; and of the live roster, whom I do not vouch for."""
        vain = {
            x for x in self.keeper_sitting.until if self.keeper_sitting.out(x, step=self.version, now=self.world.now)
        }
        if self.rules.reach_together:
            vain |= {x for x in self.opinions.live(self.stage) if not self.opinions.vouch(x)}
        return frozenset(vain)

    def _passed_over(self, peer: Peer) -> bool:
        """Most of the live roster say so: passing over somebody alone would make two keepers of one view."""
        if not self.rules.pass_over_together:
            return peer in self.passes_over()
        live = self.opinions.live(self.stage)
        beats = self.opinions.beats
        lists = [self.passes_over(), *(beats[x].passes_over for x in live if x in beats and x != self.id)]
        return 2 * sum(peer in each for each in lists) > len(live)

    def first(self) -> Peer:
        """Whom I promise in my view (M13)."""
        order = self.order()
        for strict in (True, False) if self.view == 0 or not self.rules.sitting_ends else (False,):
            for peer in order:
                if self._may_keep(peer, strict=strict):
                    return peer
        return self.id

    def budget(self) -> float:
        """How long a view has for its commit."""
        return max(6 * self.median(), self.clock.view_limit) * 2 ** min(self.view, 5) * self.jitter

    def _change_view(self) -> None:
        """M14: join most of the others; give up a keeper that gets nothing done; keep if it is my turn."""
        now, live = self.world.now, self.opinions.live(self.stage) - {self.id}
        views = sorted(
            (self.opinions.beats[peer].view for peer in live if self.opinions.version(peer) == self.version),
            reverse=True,
        )
        need = len(live) // 2
        if len(views) > need and self.view < views[need] and (len(live) > 1 or views[need] == self.view + 1):
            self._charge_keeper()
            self._enter(views[need])
        if self.stage in self.commits:
            return
        promised = self.promised is not None and self.promised[0] == self.view and self.promised[2] != self.id
        unheard = promised and now - self.answered_at > 3 * self.clock.suspect * 2 ** min(self.view, 5)
        if unheard or now - self.view_at > self.budget():
            self._charge_keeper()
            self._enter(self.view + 1)
        if self.first() == self.id and self.keeper is None and not self.opinions.strange(self.stage):
            order = self.order()
            ballot = (self.view, order.index(self.id) if self.id in order else 99, self.id)
            if self.promised is None or self.promised < ballot:
                self.promised, self.answered_at, self.round = ballot, now, None
                self.keeper = Keeper(self, ballot, stood_at=now)

    def _charge_keeper(self) -> None:
        mine = self.promised is not None and self.promised[0] == self.view
        keeper = self.promised[2] if self.promised is not None and mine else self.first()
        self.charge(keeper, self.world.now - self.view_at, kept=True)

    def _enter(self, view: int) -> None:
        self.view, self.view_at, self.answered_at = view, self.world.now, self.world.now
        self.keeper, self.jitter = None, self.world.rng.uniform(0.8, 1.2)
