"""What a member with one valid key may say that is not true, or not do. A lie is a mode; several may hold at once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from model_rules import Ack, Beat, Order, Peer, Report, Sum

if TYPE_CHECKING:
    from model_member import Member

LIES = {
    "mute": "heartbeats, and not a word of the step: no reports, no orders",
    "noack": "holds the sum, and acks nothing",
    "nodeliver": "takes grants, never sums them",
    "drip": "takes grants, sums each just before patience ends",
    "stall": "takes part in rounds, sends no parts",
    "halfstall": "sends parts to half of the others",
    "falseack": "acks sums that nobody made, two of one round",
    "ballot": "view 1000, orders under any ballot",
    "idle": "keeps, and grants nothing",
    "nocommit": "keeps, and publishes no commit",
    "selfish": "keeps, and grants itself alone",
    "equi": "opens one round with two contents, acks both",
    "forge": "has members adopt a sum that nobody made",
    "leaveout": "keeps, and closes others' generations",
    "ahead": "says it is fifty versions ahead",
    "fcommit": "publishes commits that nobody signed",
    "nosnap": "serves no snapshot",
    "nodial": "can not be called",
    "repflap": "reports another generation every time",
    "accuse": "takes part, says that nobody's parts come",
}
STRANGERS = {
    "silent": "only heartbeats, at the version of the others",
    "once": "contributes until it is in the roster, then only heartbeats",
}
"""What costs a fresh identity little."""


class Lie:
    """modes: of `LIES`. redraw: take others as the run goes on."""

    def __init__(self, rng: random.Random, modes: list[str], *, redraw: bool = False) -> None:
        self.rng, self.modes, self.redraw = rng, set(modes), redraw
        self._until = 0

    @property
    def only_beats(self) -> bool:
        """Does it do nothing else?"""
        return "silent" in self.modes

    def prepare(self, member: Member) -> None:
        """Before each tick."""
        now = member.world.now
        if self.redraw and now >= self._until:
            self.modes = set(self.rng.sample(sorted(LIES), self.rng.randint(1, 4)))
            self._until = now + self.rng.randint(5, 20) * member.clock.suspect
        if "once" in self.modes and any(
            member.id in other.opinions.roster(member.stage) for other in member.world.honest(member.stage)
        ):
            self.modes = {"silent"}
        if self.only_beats:
            newest = max(member.world.honest(member.stage), key=lambda other: (other.synced, other.version))
            member.version, member.chain, member.synced = newest.version, newest.chain, True

    def withholds(self, member: Member, index: int) -> bool:
        """Is what it owns never summed, or late?"""
        if "drip" in self.modes:
            return member.world.now - member.due[index] < member.patience() - 4 * max(member.clock.delays)
        return "nodeliver" in self.modes

    def sends_parts(self, to: Peer, peers: list[Peer]) -> bool:
        """To that member, in the exchange."""
        if "halfstall" in self.modes:
            return sorted(peers).index(to) % 2 == 0
        return "stall" not in self.modes

    def beat(self, member: Member, to: Peer) -> Beat:
        """Its heartbeat to one peer."""
        beat, world, other = member.beat(), member.world, member.world.members[to]

        def forged(number: int, stage: int = member.stage) -> Ack:
            sum_ = Sum(0, (0, 0, member.id), number, forged=member.id)
            return Ack(member.id, stage, other.version, sum_, frozenset(world.of_stage(stage)))

        if beat.ack is not None:  # whoever it likes is vouched for
            beat.ack = beat.ack._replace(vouched=frozenset(world.of_stage(member.stage)) & world.liars)
        if "noack" in self.modes:
            beat.ack = beat.last_ack = None
            beat.commits, beat.last_commits = {}, {}
        if "falseack" in self.modes:
            beat.ack = forged(self.rng.randint(0, 1))
        if "fcommit" in self.modes:
            beat.ack, beat.version = forged(0), other.version
            after = (member.stage + 1) % world.stages
            beat.commits = {
                stage: (ack.sum, frozenset({ack}))
                for stage, ack in ((after, forged(1, after)), (member.stage, forged(0)))
            }
        if "equi" in self.modes and other.sum is not None and other.stage == member.stage and not other.sum.forged:
            beat.ack = Ack(member.id, member.stage, other.version, other.sum, frozenset())
        if "ahead" in self.modes:
            beat.version += 50
        if "ballot" in self.modes:
            beat.view += 1000
            if other.stage == member.stage and member.synced:
                order = Order(
                    other.version,
                    other.chain,
                    (world.now + 9, 0, member.id),
                    True,
                    frozenset(),
                    0,
                    frozenset(),
                    None,
                    restart=other.restart,
                )
                world.send(member.id, to, order)
        return beat

    def report(self, member: Member, report: Report) -> Report | None:
        """To its keeper; None: nothing."""
        if "mute" in self.modes:
            return None
        if "noack" in self.modes:
            report = replace(report, sum=None)
        if "repflap" in self.modes:
            report = replace(report, generation=member.world.now, granted=frozenset(), summed=frozenset())
        if "accuse" in self.modes and member.round is not None:
            everybody = frozenset(member.round.receivers) - {member.id}
            report = replace(report, sum=None, missing=everybody, round=member.round.sum)
        return report

    def order(self, member: Member, to: Peer, order: Order) -> Order | None:
        """As keeper; None: nothing."""
        if to == member.id:
            return order
        if "mute" in self.modes:
            return None
        if "idle" in self.modes:
            order = replace(order, grants=frozenset(), round=None)
        if "selfish" in self.modes and order.round is None:
            order = replace(order, grants=frozenset())
        if order.round is not None:
            if "equi" in self.modes:
                sum_ = order.round.sum._replace(content=sorted(member.world.members).index(to) % 2)
                order = replace(
                    order, round=replace(order.round, sum=sum_), deny=frozenset(member.world.of_stage(member.stage))
                )
            if "leaveout" in self.modes and member.world.shuffled(to, member.version)[0] % 2:
                own = {order.generation} - {None}
                order = replace(order, round=None, closed=order.closed | own)
        if "forge" in self.modes:
            order = replace(order, adopt=Sum(0, (0, 0, member.id), 0, forged=member.id))
        return order
