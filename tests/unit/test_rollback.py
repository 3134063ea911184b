"""From which version a run goes on when it cannot by itself, and who takes which state from where."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.state.rollback import MAX_RESTARTS_AHEAD, Holding, Move, RestartReport, Rollbacks, Source, newest_on_disk

SETTLE_S, LOST_S, LAST = 3.0, 15.0, 1000


def restarts(num_stages: int = 2, *, current: Restart = NO_RESTART, **more: object) -> Rollbacks:
    return Rollbacks(num_stages, LAST, SETTLE_S, LOST_S, current=current, **more)  # type: ignore[arg-type]


def holding(peer: str, stage: int, **more: object) -> Holding:
    return Holding(PeerId(peer), stage, **more)  # type: ignore[arg-type]


def decided(machine: Rollbacks, holdings: list[Holding], *, after_s: float) -> Restart | None:
    """What it comes to want, and goes under if nobody else has anything to say; not a moment too early."""
    assert machine.decide(holdings, [], serving=False, now=0.0) is None
    assert machine.decide(holdings, [], serving=False, now=after_s - 0.1) is None and machine.wanted is None
    moved = machine.decide(holdings, [], serving=False, now=after_s + 0.1)
    return machine.current if moved is Move.GO_BACK else None


def under(*restarts: Restart) -> list[RestartReport]:
    """Peers with state that are content where they are."""
    return [RestartReport(restart) for restart in restarts]


# ------------------------------------------------------------ when, and from which version


def test_a_run_that_has_not_begun_needs_no_decision() -> None:
    machine = restarts()
    assert decided(machine, [holding("a", 0, version=0), holding("b", 1)], after_s=LOST_S) is None
    assert machine.source(holding("b", 1), [holding("a", 0, version=0)]) == Source("seed")


def test_everybody_killed_goes_on_from_the_newest_version_that_every_stage_has() -> None:
    held = [holding("a", 0, disk=(10, 20, 30)), holding("b", 1, disk=(10, 20)), holding("c", 1, disk=(10,))]
    machine = restarts()
    assert decided(machine, held, after_s=SETTLE_S) == Restart(1, 20)


def test_a_stage_that_has_not_come_back_yet_is_waited_for() -> None:
    machine = restarts()
    assert decided(machine, [holding("a", 0, disk=(10, 20))], after_s=LOST_S) is None
    words = machine.words([holding("a", 0, disk=(10, 20))])
    assert "stage 1" in words and words.startswith(
        "the peers that are up have no version of the weights in every stage"
    )


def test_whoever_comes_back_late_is_waited_for_as_long_as_others_appear() -> None:
    machine, early = restarts(), [holding("a", 0, disk=(10, 20)), holding("b", 1, disk=(10,))]
    late = [*early, holding("c", 1, disk=(20,))]
    machine.want(early, now=0.0)
    machine.want(late, now=SETTLE_S - 0.1)
    machine.want(late, now=2 * SETTLE_S - 0.2)
    assert machine.wanted is None
    machine.want(late, now=2 * SETTLE_S)
    assert machine.wanted == Restart(1, 20)


def test_newcomers_who_train_from_the_seed_do_not_put_the_decision_off_by_moving() -> None:
    """Those who have the run on disk wait for the decision meanwhile, and take no state of the new beginning."""
    machine = restarts()
    old = [holding("a", 0, disk=(20, 22)), holding("b", 1, disk=(22,))]
    for tick in range(31):
        new = [holding("c", 0, version=tick, disk=(tick,)), holding("d", 1, version=tick)]
        if tick < 20:
            assert restarts().source(old[0], [old[1], *new]).kind == "nowhere"
        machine.want([*old, *new], now=tick * SETTLE_S / 8)
        if machine.wanted is not None:
            break
    assert machine.wanted == Restart(1, 22) and tick <= 9


def test_a_new_beginning_is_not_made_the_run_while_a_stage_of_the_old_one_is_missing() -> None:
    new = [holding("c", 0, version=0), holding("d", 1, version=0)]
    assert decided(restarts(), [holding("a", 0, disk=(22,)), *new], after_s=LOST_S) is None


def test_a_stage_lost_before_its_first_checkpoint_goes_back_to_the_seed_though_others_have_written_theirs() -> None:
    held = [holding("a", 0, version=2, disk=(2,)), holding("b", 1)]
    assert decided(restarts(seed_until=2), held, after_s=LOST_S) == Restart(1, 0)
    further = [holding("a", 0, version=5, disk=(2, 4)), holding("b", 1)]
    assert decided(restarts(seed_until=2), further, after_s=LOST_S) is None  # whoever has it may come back


def test_whoever_has_later_state_than_a_run_that_began_again_keeps_it_until_it_is_caught_up_with() -> None:
    """Its stage alone is no ground to go back; with a mate's state its disk would fill with the new beginning."""
    machine, mine = restarts(), holding("a", 0, disk=(22,))
    new = [holding("c", 0, version=5, disk=(4,)), holding("d", 1, version=5, disk=(4,))]
    source = machine.source(mine, new)
    assert source.kind == "nowhere" and "step 22" in source.words
    assert decided(machine, [mine, *new], after_s=LOST_S) is None
    level = [holding("c", 0, version=21), holding("d", 1, version=21)]
    assert machine.source(mine, level) == Source("replicas", peers=(PeerId("c"),))


def test_a_run_that_goes_on_is_left_alone_whatever_is_on_disk() -> None:
    held = [
        holding("a", 0, version=31, disk=(30,)),
        holding("b", 1, version=30, disk=(30,)),
        holding("c", 1, disk=(20,)),
    ]
    assert decided(restarts(), held, after_s=LOST_S) is None


def test_the_last_replica_of_a_stage_comes_back_with_an_older_checkpoint() -> None:
    held = [holding("a", 0, version=37, disk=(20, 30)), holding("b", 1, disk=(20, 30))]
    machine = restarts()
    assert decided(machine, held, after_s=LOST_S) == Restart(1, 30)
    assert machine.source(held[0], held[1:], held=37) == Source("disk", 30)


def test_a_peer_without_a_disk_takes_nothing_from_those_who_began_anew() -> None:
    anew = holding("b", 0, version=2)
    kept = [holding("c", 0, disk=(20,)), holding("d", 1, disk=(20,))]
    source = restarts().source(holding("a", 0), [anew, *kept])
    assert source.kind == "nowhere" and "about to go on" in source.words
    assert restarts().source(holding("a", 0), [anew]) == Source("replicas", peers=(PeerId("b"),))


def test_a_peer_without_initial_weights_takes_those_of_a_replica_or_waits() -> None:
    machine, young = restarts(), [holding("b", 0, version=0), holding("c", 1, version=0)]
    mine = holding("a", 0)
    assert machine.source(mine, young) == Source("seed")
    assert machine.source(mine, young, no_seed="moved away") == Source("replicas", peers=(PeerId("b"),))
    assert machine.source(mine, young[1:], no_seed="moved away") == Source("nowhere", words="moved away")


def test_whoever_is_where_the_run_goes_on_stays_there() -> None:
    held = [holding("a", 0, version=30), holding("b", 1, disk=(20, 30))]
    machine = restarts()
    assert decided(machine, held, after_s=LOST_S) == Restart(1, 30)
    assert machine.source(held[0], held[1:], held=held[0].version) == Source("here")


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


# ------------------------------------------------------------ by whose word


LACKING = [holding("a", 0, version=37, disk=(20, 30)), holding("b", 1, disk=(20, 30))]
WANTED = Restart(1, 30)


def wanting(machine: Rollbacks, words: list[RestartReport], holdings: list[Holding] | None = None) -> Move | None:
    """What a peer does that has come to want a restart, given what the others say."""
    held = LACKING if holdings is None else holdings
    assert machine.decide(held, words, serving=True, now=0.0) is None
    return machine.decide(held, words, serving=True, now=LOST_S + 0.1)


def test_nobody_goes_back_before_more_than_half_of_all_want_it() -> None:
    want, content = RestartReport(wants=WANTED), RestartReport()
    assert wanting(restarts(), [want]) is Move.GO_BACK
    assert wanting(restarts(), [content]) is None
    assert wanting(restarts(), [want, content]) is Move.GO_BACK
    assert wanting(restarts(), [want, content, content]) is None
    assert wanting(restarts(), [want, want, content, content]) is Move.GO_BACK
    assert wanting(restarts(), [RestartReport(WANTED), content]) is Move.GO_BACK, "who is under it wants it"
    alone = restarts()
    assert wanting(alone, [content, content]) is None and (alone.current, alone.wanted) == (NO_RESTART, WANTED)


def test_who_is_not_heard_wants_nothing_and_counts_all_the_same() -> None:
    """Behind a cut one holds the records of everybody until they expire."""
    silent = RestartReport(wants=WANTED, heard=False)
    assert wanting(restarts(), [silent]) is None
    assert wanting(restarts(), [silent, RestartReport(wants=WANTED)]) is Move.GO_BACK


def test_only_contributors_decide_while_one_of_them_is_announced() -> None:
    """Other identities are free; a contributor that is announced and silent counts as content."""
    held = [holding("me", 0, version=137, disk=(120, 130)), holding("b", 1, disk=(120, 130))]
    wanted = Restart(1, 130)

    def moves(*reports: RestartReport) -> Move | None:
        machine = restarts(me=PeerId("me"))
        machine.learn([PeerId(name) for name in ("me", "a", "b")])
        return wanting(machine, list(reports), held)

    crowd = [RestartReport(Restart(1, 120), peer=PeerId(f"free.{number}")) for number in range(9)]
    a, b = (RestartReport(wants=wanted, peer=PeerId(name)) for name in "ab")
    assert restarts().decide(held, crowd, serving=True, now=0.0) is Move.GO_BACK, "no contributor is known"
    assert moves(*crowd, replace(a, wants=NO_RESTART), replace(b, heard=False)) is None
    assert moves(*crowd, a, replace(b, heard=False)) is Move.GO_BACK
    assert moves(*crowd) is Move.GO_BACK, "the others' records have expired"


def test_a_peer_goes_on_under_the_number_that_others_have_taken_from_that_version() -> None:
    machine = restarts(floor=1)
    there = [RestartReport(wants=Restart(2, 30)), RestartReport(Restart(1, 30)), *under(*3 * [NO_RESTART])]
    assert wanting(machine, there) is None and machine.wanted == Restart(1, 30)


def test_no_other_identity_and_no_contributor_carries_the_number_of_a_restart_far_away() -> None:
    held = [holding("me", 0, version=137, disk=(120, 130)), holding("b", 1, disk=(120, 130))]
    for who, number, taken in (("free", 9, 1), ("b", 9, 9), ("b", MAX_RESTARTS_AHEAD + 1, 1)):
        machine = restarts(me=PeerId("me"))
        machine.learn([PeerId(name) for name in ("me", "b", "c")])
        reports = [RestartReport(Restart(number, 130), peer=PeerId(who)), RestartReport(peer=PeerId("c"))]
        wanting(machine, reports, held)
        assert (machine.wanted or machine.current) == Restart(taken, 130), (who, number)


def test_of_more_contributors_than_are_remembered_each_stage_has_its_part() -> None:
    machine = restarts(3)
    stages = [[PeerId(f"{stage}.{number}") for number in range(size)] for stage, size in enumerate((9, 200, 200))]
    for _ in range(2):
        machine.learn(*stages)
    assert [len(machine.voters.keys() & {*stage}) for stage in stages] == [9, 85, 85]
    assert machine.voters.keys() >= {*stages[2][-85:]}, "the latest decide, not those of the lowest ids"


def test_a_version_that_strangers_claim_is_not_what_the_run_has_got_to() -> None:
    machine = restarts(me=PeerId("a"))
    machine.learn([PeerId("a"), PeerId("b")])
    whole = [holding("a", 0, version=137), holding("b", 1, version=137)]
    crowd = [holding(f"free.{number}", 0, version=999) for number in range(9)]
    assert not machine.uncovered([*whole, *crowd])


def test_a_run_gives_way_to_what_strangers_claim_to_have_on_disk_only_while_it_is_young() -> None:
    crowd = [holding(f"free.{number}", number % 2, disk=(999,)) for number in range(9)]
    for version, gives_way in ((8, True), (800, False)):
        whole = [holding("a", 0, version=version), holding("b", 1, version=version)]
        assert (decided(restarts(), [*whole, *crowd], after_s=SETTLE_S) is not None) == gives_way


def test_what_most_want_moves_nobody_who_sees_no_need() -> None:
    whole = [holding("a", 0, version=37, disk=(30,)), holding("b", 1, version=37, disk=(30,))]
    machine = restarts()
    assert wanting(machine, [RestartReport(wants=WANTED)] * 5, whole) is None and machine.wanted is None


def test_the_restart_that_is_gone_to_is_one_that_more_than_half_want_or_go_beyond() -> None:
    far = RestartReport(wants=Restart(900, 30))
    machine = restarts()
    assert wanting(machine, [far, RestartReport(wants=WANTED)]) is Move.GO_BACK and machine.current == WANTED
    nowhere = restarts()
    assert wanting(nowhere, [RestartReport(wants=Restart(1, 35))] * 3) is None, "of that version nobody has anything"


def test_a_want_lasts_while_others_come_to_it_and_ends_with_its_reason() -> None:
    machine = restarts()
    assert wanting(machine, [RestartReport(), RestartReport()]) is None and machine.wanted == WANTED
    machine.want([replace(LACKING[0], version=38), LACKING[1]], now=LOST_S + 0.2)
    assert machine.wanted == WANTED
    machine.want([*LACKING, holding("c", 1, version=37)], now=LOST_S + 0.3)
    assert machine.wanted is None


def test_a_newcomer_follows_those_who_have_a_say_if_more_than_half_of_them_go_there() -> None:
    running = [holding("a", 0, version=9, disk=(8,)), holding("b", 1, version=9, disk=(8,))]
    one, far = Restart(1, 8), Restart(7, 8)

    def goes(*words: RestartReport) -> Restart:
        machine = restarts()
        machine.decide(running, words, serving=False, now=0.0)
        return machine.current

    assert goes(*under(NO_RESTART, NO_RESTART, far)) == NO_RESTART
    assert goes(*under(one, one, far)) == one, "a number somebody makes up does not lead beyond the others'"
    assert goes(*under(one), RestartReport(holds=False), RestartReport(holds=False)) == one, "other newcomers have none"
    assert goes(*under(one), *[replace(word, heard=False) for word in under(NO_RESTART) * 3]) == one
    assert goes(*under(Restart(1, LAST + 1)) * 3) == NO_RESTART, "beyond the end of the run it is nobody's"


def test_a_peer_without_state_asks_those_who_serve_before_it_goes_where_most_records_go() -> None:
    def goes(version: int, *, in_vain: bool = False, stage: int = 0) -> Move | None:
        machine = restarts(me=PeerId("me"), in_vain=in_vain)
        running = [holding("a", 0, version=version), holding("b", 1, version=version), holding("me", stage)]
        crowd = [RestartReport(Restart(7, 0), peer=PeerId(f"free.{number}")) for number in range(9)]
        return machine.decide(running, crowd, serving=False, now=0.0)

    assert goes(137) is None
    assert goes(137, in_vain=True) is Move.GO_BACK, "what they claim to have they do not hand over"
    assert goes(137, stage=2) is Move.GO_BACK, "nobody has its stage there"
    assert goes(8) is Move.GO_BACK, "the run is young"


def test_whoever_serves_follows_more_than_half_and_no_fewer() -> None:
    ahead = [
        holding("a", 0, version=431),
        holding("c", 0, restart=Restart(1, 8), version=12),
        holding("d", 1, restart=Restart(1, 8), version=12),
    ]
    for numbers, goes in (((1,), False), ((1, 1), True), ((1, 1, 0), False), ((1, 1, 1, 0), True)):
        machine = restarts()
        words = under(*[Restart(number, 8 * number) for number in numbers])
        whole = [holding("b", 1, version=431), *ahead]
        assert machine.decide(whole, words, serving=True, now=0.0) is (Move.KEEP if goes else None), numbers
        assert machine.current == (Restart(1, 8) if goes else NO_RESTART)
        if goes:
            assert restarts().decide(ahead, words, serving=True, now=0.0) is Move.GO_BACK, "it lacks a stage"


def test_whoever_is_one_version_further_keeps_it_only_if_the_others_have_not_gone_back_to_the_last_one() -> None:
    """They have lost the sum of that step, and without it nobody gets as far as that."""
    there = Restart(1, 8)

    def goes(others_at: int, under_it: Restart) -> Move | None:
        whole = [holding("a", 0, version=9), holding("b", 1, restart=under_it, version=others_at)]
        return restarts().decide(whole, under(there, there), serving=True, now=0.0)

    assert goes(8, there) is Move.GO_BACK
    assert goes(9, there) is Move.KEEP, "it has kept its own, too"
    assert goes(8, NO_RESTART) is Move.KEEP, "it is about to end the step"


def test_whoever_was_left_behind_goes_on_with_what_it_has_once_nobody_is_ahead() -> None:
    one = Restart(1, 4)
    mine = holding("b", 1, restart=one, disk=(4,))

    def source(version: int) -> Source:
        others = [holding("a", 0, restart=one, version=version)]
        return restarts(current=one).source(mine, others, held=4, beyond=4)

    assert source(5).kind == "nowhere"
    assert source(4) == Source("here")


def test_of_two_sides_of_one_size_the_one_that_lacks_a_stage_gives_way() -> None:
    other = Restart(1, 8)
    whole = [holding("c", 0, restart=other, version=12), holding("d", 1, restart=other, version=12)]
    lacking, complete = [holding("a", 0, version=431)], [holding("a", 0, version=431), holding("b", 1, version=431)]
    assert restarts().decide(lacking + whole, under(other), serving=True, now=0.0) is Move.GO_BACK
    assert restarts().decide(complete + whole, under(other), serving=True, now=0.0) is None
    assert restarts().decide(lacking + whole[:1], under(other), serving=True, now=0.0) is None


def test_whoever_finds_itself_alone_under_a_higher_number_takes_it_back() -> None:
    machine = restarts(current=Restart(1, 8))
    whole = [holding("a", 0, version=431), holding("b", 1, version=431)]
    there = under(NO_RESTART, NO_RESTART)
    assert machine.decide(whole, there, serving=True, now=0.0) is None
    assert machine.decide(whole, there, serving=True, now=SETTLE_S - 0.1) is None, "the others may be on their way"
    assert machine.decide(whole, there, serving=True, now=SETTLE_S) is Move.TAKE_BACK
    assert machine.current == NO_RESTART

    def stays(*words: RestartReport) -> bool:
        alone, mine = restarts(current=Restart(1, 8)), [replace(h, restart=Restart(1, 8)) for h in whole]
        alone.decide(mine, words, serving=True, now=0.0)
        return alone.decide(mine, words, serving=True, now=10 * SETTLE_S) is None

    assert stays() and stays(RestartReport(Restart(1, 8)), RestartReport())
    assert stays(RestartReport(wants=Restart(1, 8)), RestartReport()), "who wants it is about to come"
    assert stays(RestartReport(heard=False), RestartReport(heard=False)), "behind a cut nobody is left to go along with"
    assert not stays(RestartReport(Restart(9, 0)), RestartReport(), RestartReport())


def test_what_was_put_by_is_loaded_when_a_restart_is_taken_back() -> None:
    """And by whoever was away for a moment: the others have got no further, and nobody else has the stage."""
    others = [holding("a", 0, version=37)]
    assert restarts().source(holding("b", 1, disk=(30, 37)), others) == Source("disk", 37)
    assert restarts().source(holding("b", 1, disk=(30, 36)), others).kind == "nowhere"
    mates = [*others, holding("c", 1, version=37)]
    assert restarts().source(holding("b", 1, disk=(30, 37)), mates) == Source("replicas", peers=(PeerId("c"),))


# ------------------------------------------------------------ one who makes things up


def claims(version: int) -> list[Holding]:
    """One identity that has everything of every stage, by its own word."""
    return [holding("liar", stage, version=version, disk=(version,)) for stage in range(2)]


def test_a_version_that_one_of_several_claims_is_not_what_the_run_has_got_to() -> None:
    whole = [holding(f"{name}{stage}", stage, version=37, disk=(30,)) for stage in range(2) for name in "abc"]
    assert decided(restarts(), [*whole, holding("liar", 1, version=10**6)], after_s=LOST_S) is None
    assert restarts().uncovered([*whole, holding("liar", 1, version=10**6)]) == ()
    two = [*whole, holding("liar", 1, version=87), holding("another", 1, version=87)]
    assert restarts().uncovered(two) == ()


def test_a_disk_that_one_of_several_claims_is_no_reason_to_begin_again() -> None:
    whole = [holding(f"{name}{stage}", stage, version=37, disk=(30,)) for stage in range(2) for name in "ab"]
    assert decided(restarts(), [*whole, *(replace(h, version=None) for h in claims(900))], after_s=LOST_S) is None
    young = [holding("a", 0, version=0), holding("b", 1, version=0), *(replace(h, version=None) for h in claims(900))]
    assert decided(restarts(), young, after_s=LOST_S) is None


def test_a_version_that_one_identity_has_of_all_stages_is_not_gone_back_to_while_others_have_less() -> None:
    killed = [holding("a", 0, disk=(20, 22)), holding("b", 1, disk=(20, 22)), *claims(900)]
    assert restarts().common([replace(h, version=None) for h in killed]) == 22
    assert restarts().common([replace(h, version=None) for h in claims(900)]) == 900


def test_who_moves_all_the_time_does_not_put_the_decision_off() -> None:
    lost = [*[holding(name, 0, version=37, disk=(30,)) for name in "abc"], holding("d", 1, disk=(30,))]
    machine = restarts()
    for second in range(int(LOST_S) + 2):
        machine.want([*lost, holding("liar", 0, version=second, disk=(second,))], now=float(second))
    assert machine.wanted == Restart(1, 30)


def test_newcomers_that_began_at_the_seed_give_way_to_what_others_have_on_disk() -> None:
    held = [
        holding("a", 0, version=3),
        holding("b", 1, version=3),
        holding("c", 0, disk=(20,)),
        holding("d", 1, disk=(20, 22)),
    ]
    assert decided(restarts(), held, after_s=SETTLE_S) == Restart(1, 20)
    young = [holding("a", 0, version=0), holding("d", 1, disk=(20,))]
    machine = restarts()
    assert decided(machine, young, after_s=SETTLE_S) is None
    assert "no peer has the state of stage 0" in machine.words(young)


def test_one_who_claims_to_be_far_ahead_does_not_stop_a_run_that_moves() -> None:
    machine = restarts()
    for now in range(100):
        held = [
            holding("a", 0, version=40 + now, disk=(40,)),
            holding("b", 1, version=40 + now, disk=(40,)),
            holding("liar", 1, version=10**6),
        ]
        machine.want(held, now=float(now))
        assert machine.wanted is None


# ------------------------------------------------------------ from where


def test_a_joiner_takes_the_newest_served_state_of_the_present_restart() -> None:
    now = Restart(1, 20)
    machine = restarts(current=now)
    mates = [
        holding("x", 1, restart=now, version=24),
        holding("y", 1, restart=now, version=25),
        holding("z", 1, restart=NO_RESTART, version=40),
    ]
    assert machine.source(holding("b", 1, disk=(20,)), mates) == Source("replicas", peers=(PeerId("y"), PeerId("x")))


def test_an_old_decision_is_no_reason_to_load_an_old_checkpoint() -> None:
    now = Restart(1, 20)
    machine = restarts(current=now)
    assert machine.source(holding("b", 1, disk=(20,)), [holding("a", 0, restart=now, version=60)]).kind == "nowhere"


def test_a_replica_without_the_version_takes_it_from_a_mates_disk() -> None:
    machine = restarts(current=Restart(1, 20))
    assert machine.source(holding("b", 1, disk=(10,)), [holding("c", 1, disk=(20,))]) == Source(
        "replicas", 20, (PeerId("c"),)
    )


def test_with_leave_to_drop_a_lost_stage_goes_on_alone_from_its_newest_checkpoint() -> None:
    held = [holding("a", 0, version=37), holding("b", 1, disk=(20, 30)), holding("c", 1, disk=(20,))]
    machine = restarts(allow_drop=True)
    assert decided(machine, held, after_s=LOST_S) == Restart(1, 37)
    assert machine.source(held[0], held[1:], held=held[0].version) == Source("here")
    assert machine.source(held[1], [held[0], held[2]]) == Source("disk", 30)
    assert machine.source(held[2], held[:2]).kind == "nowhere"
    now = machine.current
    serving = [holding("a", 0, version=37, restart=now), holding("b", 1, version=37, restart=now)]
    assert machine.source(held[2], serving) == Source("replicas", peers=(PeerId("b"),))


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


@settings(max_examples=60, deadline=None)
@given(swarm=_swarms(), late=st.data())
def test_all_come_to_serve_one_version_if_every_stage_has_one(swarm: list[Holding], late: st.DataObject) -> None:
    """Peers that see the others late, and not all at once, still end under one restart, in the state it names."""
    num_stages = 1 + max(h.stage for h in swarm)
    machines = {h.peer: Rollbacks(num_stages, LAST, SETTLE_S, LOST_S) for h in swarm}
    state = {h.peer: h for h in swarm}
    possible = restarts(num_stages).common(swarm)
    stuck = restarts(num_stages).uncovered(swarm)
    put_by: dict[tuple[PeerId, Restart], int] = {}
    for now in range(90):
        for peer in late.draw(st.permutations(sorted(state))) if now < 20 else sorted(state):
            machine, mine = machines[peer], state[peer]
            hidden = late.draw(st.sampled_from(sorted(state))) if now < 20 else None
            others = [h for h in state.values() if h.peer not in (peer, hidden)]
            said = [
                RestartReport(
                    h.restart,
                    machines[h.peer].wanted or NO_RESTART,
                    holds=bool(h.restart.number) or h.version is not None,
                )
                for h in state.values()
                if h.peer != peer
            ]
            before = machine.current
            moved = machine.decide([mine, *others], said, serving=mine.version is not None, now=float(now))
            if moved is Move.GO_BACK and mine.version is not None:
                put_by[peer, before] = mine.version
            if moved is Move.TAKE_BACK and (peer, machine.current) in put_by:
                mine = replace(mine, disk=(*mine.disk, put_by[peer, machine.current]))
            if mine.restart != machine.current or mine.version is None:
                match machine.source(replace(mine, version=None), others, held=mine.version):
                    case Source("here"):
                        state[peer] = Holding(peer, mine.stage, machine.current, mine.version, mine.disk)
                    case Source("replicas", -1, donors):
                        state[peer] = Holding(peer, mine.stage, machine.current, state[donors[0]].version, mine.disk)
                    case Source("disk", version) | Source("replicas", version, _):
                        served = {h.version for h in others if h.restart == machine.current}
                        assert version == machine.current.version or version in served
                        state[peer] = Holding(peer, mine.stage, machine.current, version, mine.disk)
                    case _:
                        state[peer] = Holding(peer, mine.stage, machine.current, None, mine.disk)
    if stuck and possible:
        [restart] = {h.restart for h in state.values()}
        if restart.number:
            assert {h.version for h in state.values()} == {restart.version}
        assert not restarts(num_stages, current=restart).uncovered(list(state.values()))
    served = [h.version for h in swarm if h.version is not None]
    level = len(served) == len(swarm) and max(served) - min(served) < 2
    if level and all(version <= min(served) + 1 for h in swarm for version in h.disk):
        assert all(machine.current == NO_RESTART for machine in machines.values())


def test_the_next_restart_is_higher_than_all_that_any_disk_remembers_within_reason() -> None:
    rules = Rollbacks(1, 100, settle_s=0.0, lost_s=0.0)
    rules.remember(3)
    rules.remember(1 << 50)
    assert rules.floor == 3, "a number far ahead of all others is nobody's"


def test_a_record_of_a_stage_that_the_run_does_not_have_counts_for_nothing() -> None:
    holdings = [Holding(PeerId("a"), 0, NO_RESTART, None, (4, 8)), Holding(PeerId("x"), 7, NO_RESTART, 99, (99,))]
    assert newest_on_disk(holdings, 1) == 8


def test_a_restart_that_the_run_has_outlived_sends_nobody_back() -> None:
    """All were killed long after a restart, and records of the dead still name it."""
    machine = restarts(current=Restart(1, 100))
    mine, other = (Holding(PeerId(name), at, machine.current, None, (100, 260)) for at, name in enumerate("ab"))
    assert machine.source(mine, [other]).kind == "nowhere"
    for now in (0.0, SETTLE_S):
        machine.decide([mine, other], [], serving=False, now=now)
    assert machine.wanted == Restart(2, 260) or machine.current == Restart(2, 260)


def test_who_votes_in_no_stage_any_more_decides_nothing_and_a_disk_s_memory_stays() -> None:
    machine = restarts(me=PeerId("me"))
    machine.recall([PeerId("old")])
    machine.learn([PeerId("a"), PeerId("left")], [PeerId("b")])
    machine.learn([PeerId("a")], [])
    assert set(machine.voters) == {"old", "a", "b"}, "of stage 1 nothing is known now"


def test_a_version_that_is_nowhere_moves_nobody() -> None:
    """However many say so: those who contributed once cost nothing."""
    held = [holding("me", 0, version=94), holding("b", 1, version=94)]
    liars = under(*9 * [Restart(1, 300)])
    assert restarts(me=PeerId("me")).decide(held, liars, serving=True, now=0.0) is None
    near = under(*9 * [Restart(1, 90)])
    assert restarts(me=PeerId("me")).decide(held, near, serving=True, now=0.0) is not None
