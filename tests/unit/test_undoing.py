"""A run whose manifest says so goes back before a step whose work is proven false; any other only remembers it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.state.rollback import GIVE_UP, Holding, Move, RestartReport, Rollbacks, Source

SETTLE_S, LOST_S, LAST = 3.0, 15.0, 1000

HELD = [Holding(PeerId(name), at, version=37, disk=(20, 30, 35)) for at, name in enumerate("ab")]


def undoing(num_stages: int = 2, **more: object) -> Rollbacks:
    return Rollbacks(num_stages, LAST, SETTLE_S, LOST_S, undoes=True, **more)  # type: ignore[arg-type]


def tainted(*steps: int, held: list[Holding] = HELD) -> Rollbacks:
    """A peer that has heard verdicts about these steps of stage 1, which it has applied."""
    machine = undoing()
    for step in steps:
        machine.taint(NO_RESTART, 1, step, applied=True)
    machine.want(held, now=0.0)
    return machine


def test_the_newest_version_before_the_false_step_is_wanted_at_once_and_of_two_verdicts_the_lower_counts() -> None:
    assert tainted(34).wanted == Restart(1, 30) and tainted(35).wanted == Restart(1, 35), "step 35 is made of it"
    assert tainted(34, 22, 36).wanted == Restart(1, 20)
    assert tainted(34, 22).tainted == ((1, 34), (1, 22))


def test_it_takes_more_than_half_and_then_the_step_is_done_anew() -> None:
    machine = tainted(34)
    assert machine.decide(HELD, [RestartReport(), RestartReport()], serving=True, now=0.1) is None
    words = [RestartReport(wants=Restart(1, 30)), RestartReport()]
    assert machine.decide(HELD, words, serving=True, now=0.2) is Move.GO_BACK and machine.current == Restart(1, 30)
    assert machine.spoilt is None and not machine.tainted
    under = [replace(held, restart=machine.current, version=31) for held in HELD]
    machine.want(under, now=0.3)
    assert machine.wanted is None


def test_where_the_manifest_does_not_say_so_the_step_is_only_remembered() -> None:
    machine = Rollbacks(2, LAST, SETTLE_S, LOST_S)
    machine.taint(NO_RESTART, 1, 34, applied=True)
    machine.want(HELD, now=0.0)
    assert machine.tainted == ((1, 34),) and machine.wanted is None


def test_a_verdict_about_a_sum_that_was_not_applied_here_moves_nobody() -> None:
    """With names of its own anybody makes one."""
    machine = undoing()
    machine.taint(NO_RESTART, 1, 34, applied=False)
    machine.want(HELD, now=0.0)
    assert machine.wanted is None and not machine.tainted


def test_a_verdict_about_a_step_that_was_given_up_meanwhile_moves_nobody() -> None:
    machine = undoing()
    words = [RestartReport(Restart(1, 30))] * 2
    machine.decide([], words, serving=False, now=0.0)
    assert machine.current == Restart(1, 30)
    machine.taint(NO_RESTART, 1, 34, applied=True)
    assert machine.spoilt is None
    machine.taint(NO_RESTART, 1, 29, applied=True)
    assert machine.spoilt == 29, "that one the run has kept"


def test_whose_move_is_taken_back_wants_it_again() -> None:
    machine = tainted(34)
    machine.decide(HELD, [RestartReport(wants=Restart(1, 30))], serving=True, now=0.1)
    assert machine.spoilt is None
    assert machine.decide(HELD, [RestartReport()] * 2, serving=True, now=1.0) is None
    assert machine.decide(HELD, [RestartReport()] * 2, serving=True, now=1.1 + SETTLE_S) is Move.TAKE_BACK
    assert machine.current == NO_RESTART and machine.spoilt == 34


def test_who_sees_no_false_work_itself_keeps_none_either() -> None:
    """A joiner of later holds the weights; its stage mates have heard and gone."""
    there, whole = [RestartReport(Restart(1, 30))] * 2, HELD
    for step, moves in ((None, Move.KEEP), (34, Move.GO_BACK), (20, Move.KEEP)):
        machine = undoing()
        if step is not None:
            machine.taint(NO_RESTART, 1, step, applied=False)
        assert machine.decide(whole, there, serving=True, now=0.0) is moves, step


def test_without_a_version_before_it_a_peer_gives_up_once_and_goes_on() -> None:
    machine = tainted(19)
    assert machine.wanted is None and machine.before(19, HELD) is None
    machine.want(HELD, now=GIVE_UP * LOST_S - 0.1)
    assert machine.spoilt == 19
    machine.want(HELD, now=GIVE_UP * LOST_S)
    assert machine.spoilt is None and machine.wanted is None and machine.tainted == ((1, 19),)


def test_who_stays_alone_with_it_gives_up_too() -> None:
    machine = tainted(34)
    words = [RestartReport(), RestartReport()]
    assert machine.decide(HELD, words, serving=True, now=GIVE_UP * LOST_S) is None and machine.wanted is None
    machine.taint(NO_RESTART, 1, 36, applied=True)
    machine.want(HELD, now=GIVE_UP * LOST_S + 1.0)
    assert machine.wanted == Restart(1, 35), "the next verdict counts for itself"


def test_to_one_version_the_run_goes_back_twice_and_not_a_third_time() -> None:
    machine, held = undoing(), HELD
    for number, wanted in enumerate((Restart(1, 30), Restart(2, 30), None)):
        machine.taint(machine.current, 1, 33, applied=True)
        machine.want(held, now=float(number))
        assert machine.wanted == wanted
        if wanted is not None:
            machine.decide(held, [RestartReport(wants=wanted)], serving=True, now=float(number))
            held = [replace(each, restart=wanted) for each in held]
    machine.taint(machine.current, 1, 36, applied=True)
    assert machine.before(36, held) == 35


def test_what_is_old_enough_must_lie_with_those_who_want_it() -> None:
    """The others delete it while they go on."""
    a, b, c = HELD[0], HELD[1], Holding(PeerId("c"), 0, version=37, disk=(35, 36))
    wants, content = RestartReport(wants=Restart(1, 30), peer=b.peer), RestartReport(peer=a.peer)
    machine = tainted(34)  # it is c
    assert machine.decide([a, b, c], [wants, content], serving=True, now=0.1) is None
    assert machine.wanted == Restart(1, 30)
    both = [wants, replace(wants, peer=a.peer)]
    assert machine.decide([a, b, c], both, serving=True, now=0.2) is Move.GO_BACK


@st.composite
def _swarms(draw: st.DrawFn) -> list[Holding]:
    """Up to three stages with up to three peers each, all of which serve version 12 or 13."""
    return [
        Holding(
            PeerId(f"p{stage}.{number}"),
            stage,
            version=draw(st.integers(12, 13)),
            disk=tuple(sorted(draw(st.sets(st.integers(4, 12), min_size=1, max_size=4)))),
        )
        for stage in range(draw(st.integers(1, 3)))
        for number in range(draw(st.integers(1, 3)))
    ]


@settings(max_examples=80, deadline=None)
@given(swarm=_swarms(), step=st.integers(4, 12), data=st.data())
def test_all_come_to_serve_one_version_before_the_false_step_if_every_stage_has_one(
    swarm: list[Holding], step: int, data: st.DataObject
) -> None:
    """Each hears the verdict when it does, and sees the others late; a few have joined since, and cannot check it."""
    num_stages = 1 + max(held.stage for held in swarm)
    machines, state = {held.peer: undoing(num_stages) for held in swarm}, {held.peer: held for held in swarm}
    possible = undoing(num_stages).before(step, swarm)
    fewer = st.sets(st.sampled_from(sorted(state)), max_size=(len(swarm) - 1) // 2)
    hears_at = {peer: data.draw(st.integers(0, 3)) for peer in sorted(state)}
    joined, kept = data.draw(fewer) if len(swarm) > 2 else set(), False
    for now in range(60):
        for peer in data.draw(st.permutations(sorted(state))) if now < 8 else sorted(state):
            machine = machines[peer]
            if now == hears_at[peer]:
                machine.taint(NO_RESTART, num_stages - 1, step, applied=peer not in joined)
            # What was given up counts no more (`state.rollback`).
            seen = [
                replace(held, disk=tuple(v for v in held.disk if v <= machine.current.version))
                if machine.current.number
                else held
                for held in state.values()
            ]
            others = [held for held in seen if held.peer != peer]
            mine = next(held for held in seen if held.peer == peer)
            said = [
                RestartReport(held.restart, machines[held.peer].wanted or NO_RESTART, peer=held.peer) for held in others
            ]
            moved = machine.decide([mine, *others], said, serving=mine.version is not None, now=float(now))
            assert moved is not Move.KEEP or now < hears_at[peer]
            kept |= moved is Move.KEEP
            if mine.restart != machine.current or mine.version is None:
                match machine.source(replace(mine, version=None), others, held=mine.version):
                    case Source("here"):
                        version = mine.version
                    case Source("replicas", -1, donors):
                        version = state[donors[0]].version
                    case Source("disk", at) | Source("replicas", at, _):
                        version = at
                    case _:
                        version = None
                state[peer] = Holding(peer, mine.stage, machine.current, version, state[peer].disk)
    # A version that only those hold who cannot check the verdict is none to go back to.
    if possible is not None and not joined and not kept:
        [restart] = {held.restart for held in state.values()}
        assert restart.version == possible <= step and {held.version for held in state.values()} == {possible}
    if len({held.restart for held in state.values()}) == 1 and not kept and state[swarm[0].peer].restart.number:
        assert all(held.version <= step for held in state.values() if held.version is not None)
