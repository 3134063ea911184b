"""Whom one replica believes alive, whom it vouches for, and the rosters it holds: rules M2 to M4 of the design."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from model_rules import Beat, Certificate, Commit, Peer, Sitting, most

if TYPE_CHECKING:
    from model_network import World


FOUNDER = 10**6


class Opinions:
    """Of one replica, since it started. heard: a message came. answered: a nonce, on a connection of mine."""

    def __init__(self, world: World, me: Peer, stage: int, sitting: Sitting, convicted: set[Peer]) -> None:
        self.world, self.me, self.stage = world, me, stage
        self.sitting, self.convicted = sitting, convicted  # outlive a start: they are on disk
        self.born = world.now
        self.heard: dict[Peer, int] = {}
        self.first_heard: dict[Peer, int] = {}
        self.answered: dict[Peer, int] = {}
        self.refused: set[Peer] = set()
        self.beats: dict[Peer, Beat] = {}
        founders = world.founders if not world.rules.contributors else {}
        self.rosters: dict[int, set[Peer]] = {k: set(founders.get(k, ())) for k in range(world.stages)}
        self.given: dict[int, deque[dict[Peer, int]]] = {
            k: deque(maxlen=world.rules.leave_steps) for k in range(world.stages)
        }
        self.earned: dict[int, Counter[Peer]] = {k: Counter() for k in range(world.stages)}
        self.seated: dict[int, dict[Peer, int]] = {k: {} for k in range(world.stages)}
        self.steps = dict.fromkeys(range(world.stages), 0)
        self._live: dict[int, frozenset[Peer]] = {}
        self._live_at = -1

    # ------------------------------------------------------------ one peer

    def probe(self) -> None:
        """Nonces to everybody, on connections that I open; who answers, and who is refused."""
        for peer, other in self.world.members.items():
            if peer == self.me or not self.world.reaches(self.me, peer):
                continue
            if not other.up:
                self.refused.add(peer)
            elif other.paused_until <= self.world.now and not (other.lie and "nodial" in other.lie.modes):
                self.answered[peer] = self.world.now
                self.refused.discard(peer)

    def hear(self, peer: Peer) -> None:
        """Any message is a sign of life."""
        self.heard[peer] = self.world.now
        self.first_heard.setdefault(peer, self.world.now)
        self.refused.discard(peer)

    def recently(self, peer: Peer) -> bool:
        """Heard within T?"""
        return self.world.now - self.heard.get(peer, -(10**9)) <= self.world.clock.suspect

    def lost(self, peer: Peer, limit: int | None = None) -> bool:
        """M3: refused, no nonce answered for that long (TL), or it says itself that it is not synced."""
        if peer == self.me:
            return False
        now = self.world.now
        limit = self.world.clock.long_silence if limit is None else limit
        if peer in self.refused or now - self.answered.get(peer, self.born) > limit:
            return True
        if not self.world.rules.silence_is_no_loss and now - self.heard.get(peer, self.born) > limit:
            return True
        beat = self.beats.get(peer)
        return beat is not None and not beat.synced

    def alive(self, peer: Peer) -> bool:
        """Heard, and it can be called, both within T."""
        if peer == self.me:
            return True
        if not self.world.rules.nonces:
            return peer not in self.refused and self.recently(peer)
        return self.recently(peer) and not self.lost(peer, self.world.clock.suspect)

    def vouch(self, peer: Peer) -> bool:
        """M2. Who has proven the state is who has it: the model knows."""
        if peer == self.me:
            return True
        beat = self.beats.get(peer)
        if beat is None or beat.stage != self.stage or not beat.synced or peer in self.convicted:
            return False
        return self.alive(peer) and self.world.members[peer].synced

    def version(self, peer: Peer) -> int:
        """As last heard; -1 of a stranger."""
        beat = self.beats.get(peer)
        return -1 if beat is None else beat.version

    def sits_out(self, peer: Peer, step: int) -> bool:
        """Has it cost me so much that I do not wait for it now?"""
        return self.sitting.out(peer, step=step, now=self.world.now)

    # ------------------------------------------------------------ rosters

    def roster(self, stage: int) -> set[Peer]:
        """Who counts in a stage."""
        return self.rosters[stage] - self.convicted

    def live(self, stage: int) -> frozenset[Peer]:
        """The roster minus who is lost. Nobody: all of that stage whom I hear synced, and reach.

        Who sits out of those is not asked either: no certificate has said that it counts, and else a silent stranger
        could keep a stage from its first commit.
        """
        if self._live_at != self.world.now:
            self._live, self._live_at = {}, self.world.now
        if stage not in self._live:
            self._live[stage] = frozenset(self._find_live(stage))
        return self._live[stage]

    def _find_live(self, stage: int) -> set[Peer]:
        if not self.world.rules.live_roster:
            return self.roster(stage)
        found = {peer for peer in self.roster(stage) if not self.lost(peer)}
        if found:
            return found
        heard = {
            peer
            for peer, beat in self.beats.items()
            if beat.stage == stage and beat.synced and peer not in self.convicted and self.alive(peer)
        }
        if self.world.rules.contributors:
            active = {peer for peer in heard if not self.sitting.out(peer, step=0, now=self.world.now)}
            heard = active
        return heard | ({self.me} if stage == self.stage else set())

    def strange(self, stage: int) -> bool:
        """Do I hold no roster, and have I not yet listened for T? Then I hear nobody, and would be my own majority."""
        return not self.roster(stage) and self.world.now - self.born <= self.world.clock.suspect

    def enough(self, who: set[Peer], stage: int, dormant: frozenset[Peer] = frozenset()) -> bool:
        """More than half of the roster, or of the live roster without who takes no part in the step."""
        if not who or self.strange(stage):
            return False
        if most(who, self.roster(stage)):
            return True
        return most(who, self.live(stage) - dormant) and not self._cut_off()

    def _cut_off(self) -> bool:
        """I hear nobody of any other stage: it is I who am cut off, and my live roster says nothing."""
        if self.world.stages == 1 or not self.world.rules.cut_off_waits:
            return False
        return not any(beat.stage != self.stage and self.recently(peer) for peer, beat in self.beats.items())

    def take_in(self, stage: int, commit: Commit) -> None:
        """A commit of a stage is applied: its sum's contributors join the roster, who gave nothing for long leaves it.

        All who hold the sum know the same of it, so their rosters are the same, and their order of keepers. The
        first roster has all whom the round named, and only if they are most of whom I hear: else the first keeper could
        choose it.
        """
        rules, roster, given = self.world.rules, self.rosters[stage], self.given[stage]
        sum_, certificate = commit
        gave = self.world.contributors(sum_)
        given.append(gave)
        self.steps[stage] += 1
        self.earned[stage].update(gave)
        if not rules.contributors:
            roster |= self._voted(stage, certificate)
        elif not roster:
            live = self.live(stage)
            first = (set(gave) | self.world.named(sum_)) - self.convicted
            if not most(first, live):
                return
            roster |= first
            given[-1] = dict.fromkeys(first, 1)
            self.seated[stage] = dict.fromkeys(first, -FOUNDER)
            self.earned[stage].update(dict.fromkeys(first, FOUNDER))
        else:
            work = rules.leave_steps * self.world.microbatches / (len(roster) + 1)
            done = {peer: sum(of.get(peer, 0) for of in given) for peer in set(gave) - self.convicted - roster}
            self._seat(stage, [peer for peer, amount in sorted(done.items()) if amount >= rules.join_share * work])
        if rules.contributors:
            full = len(given) == given.maxlen
            gone = {peer for peer in roster if full and not any(peer in gave for gave in given)}
            # A keeper that grants its own alone would empty the roster of everybody else: then nobody leaves.
            if gone and (not rules.leave_guard or 2 * len(roster - gone) > len(roster)):
                roster -= gone
        else:
            limit = 8 * self.world.clock.long_silence
            silent = {x for x in roster - {self.me} if self.world.now - self.heard.get(x, self.born) > limit}
            if silent < roster:
                roster -= silent
        self._live_at = -1

    def _seat(self, stage: int, worthy: list[Peer]) -> None:
        """Who has done its share joins, a few at a time: else identities that do it once and fall silent outvote."""
        roster, seated, now = self.rosters[stage], self.seated[stage], self.steps[stage]
        for peer in worthy:
            young = {x for x in roster if now - seated.get(x, -FOUNDER) < self.world.rules.leave_steps}
            if self.world.rules.few_young and len(young) >= max(1, len(roster - young) // 3):
                return
            roster.add(peer)
            seated[peer] = now

    def _voted(self, stage: int, certificate: Certificate) -> set[Peer]:
        """Without the rule: whom more than half of the live roster vouch for."""
        live = self.live(stage)
        votes = Counter(peer for ack in certificate if ack.peer in live for peer in ack.vouched)
        return {peer for peer, number in votes.items() if 2 * number > len(live) and peer not in self.convicted}
