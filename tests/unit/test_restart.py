"""From which version a run goes on when it cannot by itself, and who takes which state from where."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.state.restart import Disk, Heard, Holding, InPlace, Live, MateDisk, Reseed, Restarts, Seed, Wait

SETTLE_S, LOST_S, LAST = 3.0, 15.0, 1000


def restarts(num_stages: int = 2, *, current: Restart = NO_RESTART, **more: object) -> Restarts:
    return Restarts(num_stages, LAST, SETTLE_S, LOST_S, current=current, **more)  # type: ignore[arg-type]


def holding(peer: str, stage: int, **more: object) -> Holding:
    return Holding(PeerId(peer), stage, **more)  # type: ignore[arg-type]


def decided(machine: Restarts, holdings: list[Holding], *, after_s: float) -> Restart | None:
    assert machine.advance(holdings, now=0.0) is None
    assert machine.advance(holdings, now=after_s - 0.1) is None
    return machine.advance(holdings, now=after_s + 0.1)


# ------------------------------------------------------------ when, and from which version


def test_a_run_that_has_not_begun_needs_no_decision() -> None:
    machine = restarts()
    assert decided(machine, [holding("a", 0, version=0), holding("b", 1)], after_s=LOST_S) is None
    assert machine.source(holding("b", 1), [holding("a", 0, version=0)]) == Seed()


def test_everybody_killed_goes_on_from_the_newest_version_that_every_stage_has() -> None:
    held = [holding("a", 0, disk=(10, 20, 30)), holding("b", 1, disk=(10, 20)), holding("c", 1, disk=(10,))]
    machine = restarts()
    assert decided(machine, held, after_s=SETTLE_S) == Restart(1, 20)


def test_a_stage_that_has_not_come_back_yet_is_waited_for() -> None:
    machine = restarts()
    assert decided(machine, [holding("a", 0, disk=(10, 20))], after_s=LOST_S) is None
    assert "stage 1" in machine.words([holding("a", 0, disk=(10, 20))])


def test_whoever_comes_back_late_is_waited_for_as_long_as_others_appear() -> None:
    machine, early = restarts(), [holding("a", 0, disk=(10, 20)), holding("b", 1, disk=(10,))]
    late = [*early, holding("c", 1, disk=(20,))]
    machine.advance(early, now=0.0)
    assert machine.advance(late, now=SETTLE_S - 0.1) is None
    assert machine.advance(late, now=2 * SETTLE_S) == Restart(1, 20)


def test_newcomers_who_train_from_the_seed_do_not_put_the_decision_off_by_moving() -> None:
    """Those who have the run on disk wait for the decision meanwhile, and take no state of the new beginning."""
    machine = restarts()
    old = [holding("a", 0, disk=(20, 22)), holding("b", 1, disk=(22,))]
    for tick in range(31):
        new = [holding("c", 0, version=tick, disk=(tick,)), holding("d", 1, version=tick)]
        if tick < 20:
            assert isinstance(restarts().source(old[0], [old[1], *new]), Wait)
        decision = machine.advance([*old, *new], now=tick * SETTLE_S / 8)
        if decision is not None:
            break
    assert decision == Restart(1, 22) and tick <= 9


def test_a_new_beginning_is_not_made_the_run_while_a_stage_of_the_old_one_is_missing() -> None:
    new = [holding("c", 0, version=0), holding("d", 1, version=0)]
    assert decided(restarts(), [holding("a", 0, disk=(22,)), *new], after_s=LOST_S) is None


def test_a_newcomer_does_not_follow_a_word_that_leads_nowhere_while_a_run_goes_on() -> None:
    running = [holding("a", 0, version=9, disk=(8,)), holding("b", 1, version=9, disk=(8,))]
    machine, bogus = restarts(), Restart(1, 30)
    assert machine.hear(bogus, [*running, holding("x", 0, restart=bogus)], serving=False) is Heard.IGNORE
    assert machine.current == NO_RESTART
    assert machine.hear(Restart(1, 8), running, serving=False) is Heard.FOLLOW
    standing = [holding("a", 0, version=9), holding("b", 1)]
    assert restarts().hear(bogus, standing, serving=False) is Heard.FOLLOW  # nothing goes on that could be left alone


def test_a_stage_lost_before_its_first_checkpoint_goes_back_to_the_seed_though_others_have_written_theirs() -> None:
    held = [holding("a", 0, version=2, disk=(2,)), holding("b", 1)]
    assert decided(restarts(seed_until=2), held, after_s=LOST_S) == Restart(1, 0)
    further = [holding("a", 0, version=5, disk=(2, 4)), holding("b", 1)]
    assert decided(restarts(seed_until=2), further, after_s=LOST_S) is None  # whoever has it may come back


def test_a_restart_beyond_the_end_of_the_run_is_nobodys() -> None:
    assert restarts().hear(Restart(1, LAST + 1), [holding("a", 0), holding("b", 1)], serving=False) is Heard.IGNORE


def test_whoever_has_later_state_than_a_run_that_began_again_keeps_it_until_it_is_caught_up_with() -> None:
    """Its stage alone is no ground to go back; with a mate's state its disk would fill with the new beginning."""
    machine, mine = restarts(), holding("a", 0, disk=(22,))
    new = [holding("c", 0, version=5, disk=(4,)), holding("d", 1, version=5, disk=(4,))]
    source = machine.source(mine, new)
    assert isinstance(source, Wait) and "step 22" in source.words
    assert decided(machine, [mine, *new], after_s=LOST_S) is None
    level = [holding("c", 0, version=21), holding("d", 1, version=21)]
    assert machine.source(mine, level) == Live((PeerId("c"),))


def test_a_run_that_goes_on_is_left_alone_whatever_is_on_disk() -> None:
    held = [holding("a", 0, version=31, disk=(30,)), holding("b", 1, version=30, disk=(30,)),
            holding("c", 1, disk=(20,))]
    assert decided(restarts(), held, after_s=LOST_S) is None


def test_the_last_replica_of_a_stage_comes_back_with_an_older_checkpoint() -> None:
    held = [holding("a", 0, version=37, disk=(20, 30)), holding("b", 1, disk=(20, 30))]
    machine = restarts()
    assert decided(machine, held, after_s=LOST_S) == Restart(1, 30)
    assert machine.source(held[0], held[1:], held=37) == Disk(30)


def test_whoever_is_where_the_run_goes_on_stays_there() -> None:
    held = [holding("a", 0, version=30), holding("b", 1, disk=(20, 30))]
    machine = restarts()
    assert decided(machine, held, after_s=LOST_S) == Restart(1, 30)
    assert machine.source(held[0], held[1:], held=held[0].version) == InPlace()


def test_a_run_without_checkpoints_so_far_goes_back_to_its_seed() -> None:
    held = [holding("a", 0, version=7), holding("b", 1)]
    assert decided(restarts(seed_until=50), held, after_s=LOST_S) == Restart(1, 0)
    assert decided(restarts(seed_until=5), held, after_s=LOST_S) is None


def test_a_decision_that_is_being_followed_is_not_made_again() -> None:
    machine = restarts(current=Restart(1, 20))
    held = [holding("a", 0, restart=Restart(1, 20), version=20), holding("b", 1, restart=Restart(1, 20), disk=(20,))]
    assert decided(machine, held, after_s=10 * LOST_S) is None


def test_a_checkpoint_that_turns_out_to_be_torn_leads_to_an_older_one() -> None:
    machine = restarts(current=Restart(1, 20))
    held = [holding("a", 0, restart=Restart(1, 20), version=20, disk=(10, 20)), holding("b", 1, disk=(10,))]
    assert decided(machine, held, after_s=LOST_S) == Restart(2, 10)


def test_the_highest_restart_is_followed_and_none_far_ahead() -> None:
    machine = restarts()
    assert machine.hear(Restart(1, 20), [], serving=False) is Heard.FOLLOW
    assert machine.hear(Restart(1, 10), [], serving=False) is Heard.IGNORE
    assert machine.hear(Restart(1, 20), [], serving=False) is Heard.IGNORE
    assert machine.hear(Restart(1, 30), [], serving=False) is Heard.FOLLOW
    assert machine.hear(Restart(2, 10), [], serving=False) is Heard.FOLLOW
    assert machine.hear(Restart(10**9, 0), [], serving=False) is Heard.IGNORE
    assert machine.hear(Restart(3, LAST + 1), [], serving=False) is Heard.IGNORE
    assert machine.current == Restart(2, 10)


def test_a_side_that_lacks_nothing_and_has_got_further_keeps_its_state() -> None:
    held = [holding("a", 0, version=431, disk=(400,)), holding("b", 1, version=430, disk=(400,))]
    machine = restarts()
    assert machine.hear(Restart(1, 8), held, serving=True) is Heard.ADOPT
    assert machine.current == Restart(1, 8)


def test_a_side_that_lacks_a_stage_goes_back_where_there_is_something_to_go_on_from() -> None:
    lacking = [holding("a", 0, version=431, disk=(400,)), holding("b", 1, disk=(400,))]
    assert restarts().hear(Restart(1, 400), lacking, serving=True) is Heard.FOLLOW
    assert restarts().hear(Restart(1, 8), lacking, serving=True) is Heard.IGNORE
    ahead = [holding("a", 0, version=431), holding("c", 0, restart=Restart(1, 8), version=12),
             holding("d", 1, restart=Restart(1, 8), version=12)]
    assert restarts().hear(Restart(1, 8), ahead, serving=True) is Heard.FOLLOW


def test_newcomers_that_began_at_the_seed_give_way_to_what_others_have_on_disk() -> None:
    held = [holding("a", 0, version=3), holding("b", 1, version=3), holding("c", 0, disk=(20,)),
            holding("d", 1, disk=(20, 22))]
    assert decided(restarts(), held, after_s=SETTLE_S) == Restart(1, 20)
    young = [holding("a", 0, version=0), holding("d", 1, disk=(20,))]
    machine = restarts()
    assert decided(machine, young, after_s=SETTLE_S) is None
    assert "nobody has the state of stage 0" in machine.words(young)


def test_one_who_claims_to_be_far_ahead_does_not_stop_a_run_that_moves() -> None:
    machine = restarts()
    for now in range(100):
        held = [holding("a", 0, version=40 + now, disk=(40,)), holding("b", 1, version=40 + now, disk=(40,)),
                holding("liar", 1, version=10**6)]
        assert machine.advance(held, now=float(now)) is None


# ------------------------------------------------------------ from where


def test_a_joiner_takes_the_newest_served_state_of_the_present_restart() -> None:
    now = Restart(1, 20)
    machine = restarts(current=now)
    mates = [holding("x", 1, restart=now, version=24), holding("y", 1, restart=now, version=25),
             holding("z", 1, restart=NO_RESTART, version=40)]
    assert machine.source(holding("b", 1, disk=(20,)), mates) == Live((PeerId("y"), PeerId("x")))


def test_an_old_decision_is_no_reason_to_load_an_old_checkpoint() -> None:
    now = Restart(1, 20)
    machine = restarts(current=now)
    assert isinstance(machine.source(holding("b", 1, disk=(20,)), [holding("a", 0, restart=now, version=60)]), Wait)


def test_a_replica_without_the_version_takes_it_from_a_mates_disk() -> None:
    machine = restarts(current=Restart(1, 20))
    assert machine.source(holding("b", 1, disk=(10,)), [holding("c", 1, disk=(20,))]) == MateDisk(20, (PeerId("c"),))


def test_with_leave_to_drop_a_lost_stage_goes_on_alone_from_its_newest_checkpoint() -> None:
    held = [holding("a", 0, version=37), holding("b", 1, disk=(20, 30)), holding("c", 1, disk=(20,))]
    machine = restarts(allow_drop=True)
    assert decided(machine, held, after_s=LOST_S) == Restart(1, 37)
    assert machine.source(held[0], held[1:], held=held[0].version) == InPlace()
    assert machine.source(held[1], [held[0], held[2]]) == Disk(30)
    assert isinstance(machine.source(held[2], held[:2]), Wait)
    now = machine.current
    serving = [holding("a", 0, version=37, restart=now), holding("b", 1, version=37, restart=now)]
    assert machine.source(held[2], serving) == Live((PeerId("b"),))


def test_a_lost_stage_is_made_from_its_neighbours_by_leave_of_its_operator_only() -> None:
    held = [holding("a", 0, version=37), holding("b", 1), holding("c", 2, version=37)]
    assert decided(restarts(3), held, after_s=LOST_S) is None
    willing = [held[0], holding("b", 1, reseed=True), held[2]]
    machine = restarts(3)
    assert decided(machine, willing, after_s=LOST_S) == Restart(1, 37)
    assert isinstance(machine.source(willing[1], [held[0], held[2]]), Wait)  # they have to be there first
    now = machine.current
    beside = [holding("a", 0, version=37, restart=now), holding("c", 2, version=37, restart=now)]
    assert machine.source(willing[1], beside) == Reseed((PeerId("a"),), (PeerId("c"),))


def test_nobody_reseeds_a_stage_that_somebody_still_has() -> None:
    held = [holding("a", 0, version=37, disk=(30,)), holding("b", 1, disk=(30,)), holding("c", 1, reseed=True)]
    assert decided(restarts(), held, after_s=LOST_S) == Restart(1, 30)


# ------------------------------------------------------------ together


@st.composite
def _swarms(draw: st.DrawFn) -> list[Holding]:
    """Up to three stages with up to three peers each, some serving, some with checkpoints."""
    num_stages = draw(st.integers(1, 3))
    found = []
    for stage in range(num_stages):
        for number in range(draw(st.integers(1, 3))):
            version = draw(st.one_of(st.none(), st.integers(1, 8)))
            disk = tuple(sorted(draw(st.sets(st.integers(1, 8), max_size=3))))
            found.append(holding(f"p{stage}.{number}", stage, version=version, disk=disk))
    return found


@settings(max_examples=60)
@given(swarm=_swarms(), late=st.data())
def test_all_come_to_serve_one_version_if_every_stage_has_one(swarm: list[Holding], late: st.DataObject) -> None:
    """Peers that see the others late, and not all at once, still end under one restart, in the state it names."""
    num_stages = 1 + max(h.stage for h in swarm)
    machines = {h.peer: Restarts(num_stages, LAST, SETTLE_S, LOST_S) for h in swarm}
    state = {h.peer: h for h in swarm}
    possible = restarts(num_stages).common(swarm)
    stuck = restarts(num_stages).uncovered(swarm)
    for now in range(90):
        for peer in late.draw(st.permutations(sorted(state))) if now < 20 else sorted(state):
            machine, mine = machines[peer], state[peer]
            hidden = late.draw(st.sampled_from(sorted(state))) if now < 20 else None
            others = [h for h in state.values() if h.peer not in (peer, hidden)]
            for other in others:
                machine.hear(other.restart, [mine, *others], serving=mine.version is not None)
            machine.advance([mine, *others], now=float(now))
            if mine.restart != machine.current or mine.version is None:
                match machine.source(replace(mine, version=None), others, held=mine.version):
                    case InPlace():
                        state[peer] = Holding(peer, mine.stage, machine.current, mine.version, mine.disk)
                    case Disk(version) | MateDisk(version, _):
                        assert version == machine.current.version
                        state[peer] = Holding(peer, mine.stage, machine.current, version, mine.disk)
                    case Live(donors):
                        state[peer] = Holding(peer, mine.stage, machine.current, state[donors[0]].version, mine.disk)
                    case _:
                        state[peer] = Holding(peer, mine.stage, machine.current, None, mine.disk)
    if stuck and possible:
        assert len({h.restart for h in state.values()}) == 1
        assert {h.version for h in state.values()} == {next(iter(state.values())).restart.version}
    if not stuck:
        assert all(machine.current == NO_RESTART for machine in machines.values())


def test_the_next_restart_is_higher_than_all_that_any_disk_remembers_within_reason() -> None:
    rules = Restarts(1, 100, settle_s=0.0, lost_s=0.0)
    rules.remember(3)
    rules.remember(1 << 50)
    assert rules.floor == 3, "a number far ahead of all others is nobody's"
