"""Single schedules that a change of the protocol must survive, between production machines.

`Play` is a scripted schedule: what `step_search` tries in every order happens here in one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from machines import Facts
from step_search import TIMERS, Faults, Pair, Setup, State, search

from swarmnet.ids import PeerId
from swarmnet.messages import StagePlan
from swarmnet.step.member import Member
from swarmnet.step.pace import Pace

A, B, C, D = (PeerId(f"0{name}") for name in "ABCD")
HANG_S = 8.0
"""A step in which one of three replicas hangs is applied within this."""


@dataclass
class Play:
    """A state that goes on in order.

    cut: pairs between which nothing arrives. mute: of them only heartbeats come. hung: they do nothing, and hear it all
    later. lie: what the liar of the setup says instead of a message.
    """

    setup: Setup
    cut: set[Pair] = field(default_factory=set)
    mute: set[PeerId] = field(default_factory=set)
    hung: set[PeerId] = field(default_factory=set)
    lie: Callable[[object], object] = lambda message: message

    def __post_init__(self) -> None:
        self.state: State = self.setup.start()
        self.began = self.state.now

    @property
    def leader(self) -> PeerId:
        return next(peer for peer in self.setup.peers if self.member(peer).oldest.leader is not None)

    def member(self, peer: PeerId) -> Member:
        return self.setup.machines.nodes[self.state.nodes[self.setup.place[peer]]].member

    def facts(self, peer: PeerId) -> Facts:
        return self.setup.machines.facts[self.state.nodes[self.setup.place[peer]]]

    def isolate(self, peer: PeerId) -> None:
        self.cut |= {pair for pair in self.setup.pairs if peer in pair}

    def end(self, peer: PeerId) -> None:
        """Its machine ends for good."""
        self.state = self.setup._end(self.state, peer, -1)

    def once(self) -> bool:
        """One message or event; False: nothing is due."""
        setup = self.setup
        for sender, to in setup.pairs:
            channel = self.state.wire[setup.pair[sender, to]]
            if channel and ((sender, to) in self.cut or (sender in self.mute and channel[0] >= 0)):
                self.state = setup._take(self.state, sender, to)[1]
                return True
        moves = [
            move
            for move in setup.moves(self.state)
            if move[0] != "tick" and move[2 if move[0] == "hear" else 1] not in self.hung
        ]
        if not moves:
            return False
        move = moves[0]
        if move[0] == "hear" and move[1] == setup.liar and (number := self.state.wire[setup.pair[move[1:]]][0]) >= 0:
            move = (*move, setup.machines.message(self.lie(setup.machines.messages[number])))
        self.state = setup.after(self.state, move)
        return True

    def until(self, done: Callable[[Play], object], *, within_s: float) -> float:
        """Go on until that is so; returns how long it took. Every state is held against the invariants."""
        setup, began = self.setup, self.state.now
        while not done(self):
            assert setup.violation(self.state) == ""
            if self.once():
                continue
            assert self.state.now - began <= within_s, "the step stands still"
            self.tick()
        assert setup.violation(self.state) == ""
        return self.state.now - began

    def tick(self) -> None:
        """A heartbeat's time: those who are not cut off hear each other."""
        setup = self.setup
        self.state = self.state._replace(now=self.state.now + TIMERS.beat_s)
        beats = [(peer, setup.machines.beat(self.state.nodes[setup.place[peer]])) for peer in self.live]
        for peer in self.live:
            heard = tuple(each for each in beats if each[0] != peer and (each[0], peer) not in self.cut)
            answered = tuple(other for other, _ in heard if (peer, other) not in self.cut)
            self.state = setup._event(self.state, peer, ("beats", heard, answered))

    @property
    def live(self) -> list[PeerId]:
        peers = zip(self.setup.peers, self.state.nodes, strict=True)
        return [peer for peer, number in peers if number >= 0 and peer not in self.hung]

    def applied(self, *peers: PeerId, within_s: float) -> float:
        """Go on until these have applied the step."""
        return self.until(lambda play: all(play.facts(peer).done for peer in peers), within_s=within_s)


def three(*, classes: bool = True) -> Play:
    """A stage of three at its second step: all have contributed to the one before."""
    return Play(Setup(replicas=3, microbatches=3, claims=((0, 0), (1, 1), (2, 2)), steps_before=1, classes=classes))


def test_c1_a_replica_that_is_cut_off_commits_no_other_value():
    play = three(classes=False)
    play.isolate(A)
    play.applied(B, C, within_s=HANG_S)
    play.until(lambda play: play.facts(A).done, within_s=60.0)
    assert play.facts(A).applied == play.facts(B).applied


def test_c2_a_signed_value_is_locked_for_the_step():
    play = three()
    play.until(lambda play: play.facts(A).signed and not play.facts(B).done, within_s=2.0)
    play.isolate(A)
    play.until(lambda play: play.state.now > play.began + 60.0, within_s=61.0)
    assert len(play.facts(A).signed) == 1


def test_c7_a_new_leader_takes_over_what_members_have_accumulated():
    play = three()
    play.until(lambda play: all(play.facts(peer).accumulated for peer in (A, B, C)), within_s=2.0)
    play.end(play.leader)
    play.applied(*play.live, within_s=HANG_S)


@pytest.mark.parametrize("leads", [True, False])
def test_c8_one_that_receives_nothing_and_is_received_by_all_holds_a_step_up_once(leads: bool):
    play = three()
    deaf = next(peer for peer in (A, B, C) if (peer == play.leader) == leads)
    others = [peer for peer in (A, B, C) if peer != deaf]
    play.cut = {(other, deaf) for other in others}
    play.applied(*others, within_s=HANG_S)
    for peer in others:
        view, now = play.member(peer).view, play.state.now
        assert not view.in_touch(deaf, now=now) and now - view.get(deaf).heard_at <= TIMERS.beat_s


@pytest.mark.parametrize("mute", [A, B, C])
def test_c9_a_replica_that_beats_and_never_says_what_it_holds_is_left_out(mute: PeerId):
    play = three()
    play.mute = {mute}
    play.applied(*(peer for peer in (A, B, C) if peer != mute), within_s=2 * TIMERS.long_silence_s)


def test_c11_two_candidates_do_not_overtake_each_other():
    play = three()
    play.end(play.leader)
    for candidate in play.live:
        play.state = play.setup._event(play.state._replace(now=play.state.now + 7.0), candidate, ("wait",))
    play.applied(*play.live, within_s=HANG_S)


def patience_s(disturbed: int, of: int) -> float:
    """After many steps of a second, so many of each few disturbed for twice as long as others were waited for."""
    pace, now = Pace(TIMERS), 0.0
    for step in range(200):
        usual = step % of >= disturbed
        now += 1.0 if usual else max(4.0, 2 * pace.patience_s)
        pace.applied(PeerId(f"0{'ABC'[step // 16 % 3]}"), now=now)
    return pace.patience_s


def test_c12_patience_does_not_grow_with_disturbed_steps():
    assert patience_s(1, 3) == patience_s(2, 3) == patience_s(0, 1)


def test_c13_a_leader_that_plans_itself_as_the_only_member_is_followed_by_none():
    """Its plan takes what the others hold: they join no such round, sign nothing, and another leads."""
    play = Play(Setup(replicas=3, microbatches=3, claims=((0, 0), (1, 1), (2, 2)), steps_before=2))
    liar = play.setup.liar = play.leader

    def alone(message: object) -> object:
        if not isinstance(message, StagePlan) or message.attempt is None:
            return message
        ((peer, generation, _),) = (part for part in message.attempt.contributions if part[0] == liar)
        mine = ((peer, generation, frozenset(range(3))),)
        return replace(message, attempt=replace(message.attempt, contributions=mine, receivers=(liar,)))

    play.lie = alone
    correct = [peer for peer in (A, B, C) if peer != liar]
    play.applied(*correct, within_s=3 * HANG_S)
    for peer in correct:
        contributed = {other for other, _, indexes in play.facts(peer).contributions if indexes}
        assert len(play.facts(peer).signed) == 1 and contributed >= set(correct)


def test_c14_a_replica_that_comes_back_adopts_the_aggregate():
    play = three()
    play.isolate(C)
    play.until(lambda play: play.facts(A).signed, within_s=HANG_S)
    play.cut.clear()
    play.applied(A, B, C, within_s=4 * HANG_S)
    assert play.facts(A).applied == play.facts(B).applied == play.facts(C).committed


def test_c15_a_committed_aggregate_whose_holders_have_died_is_made_again():
    play = three(classes=False)
    play.until(lambda play: all(play.facts(peer).accumulated for peer in (A, B, C)), within_s=2.0)
    play.hung = {C}
    play.until(lambda play: play.facts(A).committed and play.facts(B).committed, within_s=4 * HANG_S)
    committed = play.facts(A).committed
    play.hung.clear()
    play.end(A)
    play.end(B)
    play.applied(C, within_s=TIMERS.lease_s + HANG_S)
    assert play.facts(C).applied == committed


def test_c15_whoever_is_left_without_the_aggregate_is_not_taken_for_a_holder():
    """Three of five hold the committed aggregate and die. The other two ask each other for it."""
    claims = tuple((n, n) for n in range(5))
    play = Play(Setup(replicas=5, microbatches=5, claims=claims, steps_before=1, classes=False))
    play.until(lambda play: all(play.facts(peer).accumulated for peer in play.setup.peers), within_s=2.0)
    *signers, one, other = sorted(play.setup.peers, key=lambda peer: peer != play.leader)
    play.hung = {one, other}
    play.until(lambda play: all(play.facts(peer).committed for peer in signers), within_s=4 * HANG_S)
    committed = play.facts(signers[0]).committed
    play.hung.clear()
    for peer in signers:
        play.end(peer)
    play.applied(one, other, within_s=TIMERS.lease_s + 2 * HANG_S)
    assert play.facts(one).applied == play.facts(other).applied == committed


@pytest.mark.parametrize("classes", [True, False])
def test_c16_two_replicas_whose_attempt_was_given_up_end_the_step(classes: bool):
    """A replica is silent for longer than the other waits, and comes back with the attempt that was given up."""
    silence_s = TIMERS.long_silence_s + 1.0
    found = search(Setup(faults=Faults(silences=1), silence_s=silence_s, classes=classes), cap=40_000)
    assert found.complete and found.longest_s <= silence_s + TIMERS.long_silence_s


def test_l1_a_replica_that_half_of_the_others_hear_holds_a_step_up_once():
    play = Play(Setup(replicas=4, microbatches=4, claims=tuple((n, n) for n in range(4)), steps_before=1))
    late = next(peer for peer in play.setup.peers if peer != play.leader)
    some, *others = (peer for peer in play.setup.peers if peer not in (late, play.leader))
    play.cut |= {(late, play.leader), (late, some)}
    play.applied(play.leader, some, *others, within_s=HANG_S)


def test_l1_a_peer_that_half_of_the_others_observed_late_is_not_named():
    stage = {"replicas": 4, "microbatches": 4, "claims": tuple((n, n) for n in range(4)), "steps_before": 1}
    leader, late, one, other = _places(Play(Setup(**stage)))
    for observed, named in ((((one, late),), False), (((one, late), (other, late)), True)):
        play = Play(Setup(**stage, observed=observed))
        peers = play.setup.peers
        play.applied(peers[leader], peers[one], peers[other], within_s=HANG_S)
        (commit,) = play.member(peers[leader]).last_commits
        assert commit.late == ((peers[late],) if named else ()), observed


def _places(play: Play) -> list[int]:
    """The leader's place, and then those of the others."""
    return sorted(range(4), key=lambda place: play.setup.peers[place] != play.leader)
