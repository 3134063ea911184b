"""Step machines of one stage around a table: the test decides which message arrives when.

Stands in for driver, transport and engine. An accumulator is the list of indexes added to it, a sum the list of what
was contributed, so losses and doubles are visible as such.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from swarmnet.ids import NO_RESTART, Chain, PeerId
from swarmnet.manifest.schema import Delay
from swarmnet.manifest.timers import Timers
from swarmnet.messages import (
    Commit,
    Control,
    Finished,
    Heartbeat,
    MemberState,
    Round,
    StagePlan,
    Stamp,
    StateHeader,
    Vote,
)
from swarmnet.step.commits import statement
from swarmnet.step.gate import Shape
from swarmnet.step.host import Call, Deferred
from swarmnet.step.member import Member
from swarmnet.testing.virtual_swarm import SimulatedSigner

CHAIN = Chain("1" * 64)
TIMERS = Timers()
Wish = Callable[[PeerId, PeerId, Control], bool]


def anything(sender: PeerId, receiver: PeerId, message: Control) -> bool:
    return True


def kind(*kinds: type, to: str | None = None) -> Wish:
    """Messages of these kinds (to this member)."""
    return lambda sender, receiver, message: isinstance(message, kinds) and to in (None, receiver)


CONTENT = ("generation", "execute", "attempt")
"""Fields of a plan that ask more of a member than to follow the leader."""


def has(*names: str, to: str | None = None) -> Wish:
    """Plans that say something in one of these fields (to this member)."""
    return lambda sender, receiver, message: (
        isinstance(message, StagePlan) and any(getattr(message, name) for name in names) and to in (None, receiver)
    )


def wants(sender: PeerId, receiver: PeerId, message: Control) -> bool:
    """A member asks its leader for an index."""
    return isinstance(message, MemberState) and bool(message.wants)


def certified(commit: Commit, *voters: str) -> Commit:
    """That commit with the votes of these replicas of its stage."""
    names = [PeerId(name) for name in voters]
    said = statement(commit, NO_RESTART)
    return replace(commit, votes=tuple(Vote(name, SimulatedSigner(name).sign(said)) for name in names))


def calls_of(deferred: Deferred) -> list[Call]:
    """What a machine has asked for since."""
    calls = [*deferred.calls]
    deferred.calls.clear()
    return calls


class Table:
    """Members by name. Of two the higher name keeps at first: each begins alone, and its ballot is the higher one; of
    more whom most have promised."""

    def __init__(self, *names: str, microbatches: int = 2, stages: int = 1, delay: int = 0) -> None:
        self.now, self.shape = 1000.0, Shape(stages, microbatches, 10, delay=Delay(delay))
        self.members: dict[str, Member] = {}
        self.sums: dict[str, list[int]] = {}
        self.later: dict[str, list[int]] = {}
        self.rounds: dict[str, Round | None] = {}
        self.collects: dict[str, tuple[Round, bytes] | None] = {}
        self.applies: list[str] = []
        self.did: list[tuple[str, Call]] = []
        self.wire: list[tuple[PeerId, PeerId, Control]] = []
        self.starts = 0
        for name in names:
            self.start(name)
        self.settle()
        for _ in range(20):
            if len({member.oldest.promised for member in self.members.values()}) > 1:
                self.tick()

    def start(self, name: str) -> None:
        """Start a process (again): nothing of an older one of that name is left but messages under way."""
        self.starts += 1
        me = PeerId(name)
        member = Member(
            me, 0, self.shape, TIMERS, incarnation=self.starts, chain=CHAIN, now=self.now, signer=SimulatedSigner(me)
        )
        self.members[name], self.sums[name], self.rounds[name], self.collects[name] = member, [], None, None
        self.later[name] = []
        member.restored(StateHeader(0, CHAIN, CHAIN, CHAIN), None, (), now=self.now)
        self.do(name)

    def kill(self, name: str) -> None:
        """Everybody left hears that the process is gone."""
        dead = self.members.pop(name)
        for other, member in self.members.items():
            member.gone(dead.me, definite=True, now=self.now)
            self.do(other)

    def neighbour(self, name: str, *, stage: int = 1) -> None:
        """Everybody hears a replica of another stage."""
        for other, member in self.members.items():
            beat = Heartbeat(Stamp(member.version, stage, CHAIN), 1, True, None)
            member.receive(PeerId(name), beat, now=self.now)
            self.do(other)

    def suspect(self, name: str, *, by: str) -> None:
        """`by` is told, wrongly, that `name` is dead."""
        self.members[by].gone(PeerId(name), definite=True, now=self.now)
        self.do(by)

    # ------------------------------------------------------------ performing

    def do(self, name: str) -> list[Call]:
        """Do what a member has asked for since; returns that."""
        member = self.members[name]
        calls = calls_of(member.calls)
        for call in calls:
            match call:
                case ("send", (peer, message), _):
                    self.wire.append((member.me, peer, message))
                case ("beat", (), _):
                    self.wire += [(member.me, PeerId(o), member.heartbeat()) for o in self.members if o != name]
                case ("publish", (message,), _):
                    self.wire += [(member.me, PeerId(other), message) for other in self.members]
                case ("discard", (step,), _):
                    self._accumulator(name, step).clear()
                case ("aggregate", (current,), _):
                    self.rounds[name] = current
                case ("fetch", (current, digest), _):
                    self.collects[name] = current, digest
                case ("stop", (), _):
                    self.rounds[name] = self.collects[name] = None
                case ("apply", _, _):
                    self.applies.append(name)
                case _:
                    self.did.append((name, call))
        return calls

    def _accumulator(self, name: str, step: int) -> list[int]:
        return self.sums[name] if step == self.members[name].version else self.later[name]

    def claim(self, name: str, index: int, *, step: int | None = None) -> None:
        """Of the oldest step, unless told otherwise."""
        step = self.members[name].version if step is None else step
        self.members[name].claim(step, index, now=self.now)
        self.do(name)

    def add(self, name: str, index: int, *, step: int | None = None) -> None:
        """The weight pass of `index` has ended at `name`, whatever was granted."""
        step = self.members[name].version if step is None else step
        self._accumulator(name, step).append(index)
        self.members[name].add(step, index)
        self.do(name)

    def execute(self, name: str, *indexes: int, step: int | None = None) -> None:
        """Claim, be granted, add."""
        for index in indexes:
            self.claim(name, index, step=step)
        self.settle()
        for index in indexes:
            self.add(name, index, step=step)
        self.settle()

    def apply(self, *names: str) -> None:
        """The optimizer steps of these (default: of all who are at it) have ended."""
        for name in names or tuple(dict.fromkeys(self.applies)):
            self.applies.remove(name)
            self.sums[name], self.later[name], self.rounds[name] = self.later[name], [], None
            self.members[name].applied(now=self.now)
            self.do(name)
        self.settle()

    def finish(self, name: str) -> Finished:
        """The exchange of `name` is whole: what the others hold now is what they contributed."""
        current = self.rounds[name]
        assert current is not None, f"{name} takes part in no round"
        counted: list[int] = []
        for peer, _, indexes in current.contributions:
            contributing = self.rounds[peer]
            assert contributing is not None and contributing.id == current.id, f"{peer} does not contribute"
            assert sorted(self.sums[peer]) == sorted(indexes), f"{peer} contributes {self.sums[peer]}, not {indexes}"
            counted += self.sums[peer]
        assert sorted(counted) == list(range(self.shape.num_microbatches)), f"summed {counted}"
        digest = hashlib.sha256(str(sorted(counted)).encode()).digest()
        named = {"late": current.late, "bans": current.bans}
        finished = Finished(current.id, digest, len(counted), 0.0, 1.0, current.contributions, **named)
        self.members[name].oldest.sum_whole(finished, now=self.now)
        self.do(name)
        return finished

    def collect(self, name: str) -> None:
        """`name` fetches the sum it was told to collect."""
        wanted = self.collects[name]
        assert wanted is not None, f"{name} collects nothing"
        current, digest = wanted
        found = [self.members[h].sum_of(current.stamp, current.id) for h in current.holders if h in self.members]
        whole = [finished for finished in found if finished is not None and finished.digest == digest]
        assert whole, f"nobody of {current.holders} holds {current.id}"
        self.members[name].oldest.sum_whole(whole[0], now=self.now)
        self.do(name)

    # ------------------------------------------------------------ messages and time

    def take(self, wish: Wish) -> list[tuple[PeerId, PeerId, Control]]:
        """Take messages off the wire, to lose them or to deliver them later."""
        taken = [entry for entry in self.wire if wish(*entry)]
        self.wire = [entry for entry in self.wire if entry not in taken]
        return taken

    def put(self, entries: list[tuple[PeerId, PeerId, Control]]) -> None:
        """Deliver now what was taken off the wire (or a copy of it)."""
        for sender, receiver, message in entries:
            if receiver in self.members:
                self.members[receiver].receive(sender, message, now=self.now)
                self.do(receiver)

    def settle(self, wish: Wish = anything) -> None:
        """Deliver what is on the wire, and what that causes, as long as it is wished for."""
        for _ in range(1000):
            wished = [entry for entry in self.wire if wish(*entry)]
            if not wished:
                return
            arriving = next((entry for entry in wished if entry[0] == entry[1]), wished[0])  # its own word comes first
            self.wire.remove(arriving)
            self.put([arriving])
        raise AssertionError(f"no rest: {self.wire[:5]}")

    def tick(self, seconds: float = 0.5, *, silent: tuple[str, ...] = ()) -> None:
        """Let time pass, heartbeat by heartbeat; who is silent neither speaks nor hears."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.5
            for name, member in list(self.members.items()):
                if name in silent:
                    continue
                beat = member.heartbeat()
                self.wire += [(member.me, PeerId(other), beat) for other in self.members if other != name]
                for other in self.members.keys() - silent:
                    member.view.echo(PeerId(other), now=self.now)
                member.tick(now=self.now)
                self.do(name)
            if silent:
                self.take(lambda sender, receiver, _: sender in silent or receiver in silent)
            self.settle()

    # ------------------------------------------------------------ looking

    @property
    def leader(self) -> str:
        """Who keeps, if exactly one does."""
        (name,) = [name for name, member in self.members.items() if member.oldest.leader is not None]
        return name

    def orders(self) -> list[tuple[str, int]]:
        """(member, index) the leader has had executed since last asked."""
        found = [(name, call.args[1]) for name, call in self.did if call.name == "execute"]
        self.did = [(name, call) for name, call in self.did if call.name != "execute"]
        return found

    def notes(self) -> list[str]:
        return [call.args[0] for _, call in self.did if call.name == "log"]

    def work_until_summed(self, *, rounds: int = 60) -> None:
        """Obey orders and pass time until a round is open for all members."""
        for _ in range(rounds):
            for name, index in self.orders():
                if name in self.members and index not in self.members[name].oldest.claims.accumulated:
                    self.claim(name, index)
                    self.settle()
            for name, member in self.members.items():
                for index in sorted(member.oldest.claims.assigned - member.oldest.claims.accumulated):
                    self.add(name, index)
            self.settle()
            leaders = [member.oldest.leader for member in self.members.values() if member.oldest.leader is not None]
            if len(leaders) == 1 and leaders[0].round is not None:
                current = leaders[0].round.id
                if all(joined is not None and joined.id == current for _, joined in self._joined()):
                    return
            self.tick()
        raise AssertionError(
            "no round: "
            + "; ".join(
                f"{name}: granted={member.oldest.claims.assigned} summed={member.oldest.claims.accumulated} "
                f"owners={member.oldest.leader and member.oldest.leader.ledger.owners}"
                for name, member in self.members.items()
            )
        )

    def _joined(self) -> list[tuple[str, Round | None]]:
        return [(name, self.rounds[name]) for name in self.members]

    def finish_all(self) -> None:
        """Everybody ends its round, commits and applies."""
        for name in list(self.members):
            self.finish(name)
        self.settle()
        assert sorted(self.applies) == sorted(self.members)


def is_beat(sender: PeerId, receiver: PeerId, message: Control) -> bool:
    return isinstance(message, Heartbeat) or (
        isinstance(message, StagePlan) and not has(*CONTENT)(sender, receiver, message)
    )
