"""What status makes of a run that lost a stage, went back, is joined and left: each in its own words."""

from dataclasses import replace

from swarmnet.directory import Complaint, DisputedWork, Estimate, Record, StageStatus, TaintedStep
from swarmnet.ids import NO_RESTART, Chain, OnDisk, PeerId, Restart, RunId
from swarmnet.peer.rates import mark
from swarmnet.peer.swarm_health import _PROBLEMS, Assessment, Problem, assess

RUN = RunId("ab" * 32)
BACK = Restart(1, 40)


def record(name: str, *statuses: StageStatus, **changes: object) -> Record:
    return replace(Record(RUN, PeerId(name), 1, (), statuses, numerics="cpu"), **changes)


def status(stage: int, version: int = 41, disk: tuple[int, ...] = (), **changes: object) -> StageStatus:
    plain = StageStatus(stage, version, Chain("c"), synced=True, slots=4, disk=tuple(map(OnDisk, disk)))
    return replace(plain, **changes)


TRAINER = record("t", trainer=True)


def three(stage: int, **changes: object) -> list[Record]:
    return [record(f"{stage}-{number}", status(stage, **changes)) for number in range(3)]


def found(*records: Record, num_stages: int = 2) -> tuple[Assessment, dict[str, Problem]]:
    result = assess(RUN, [TRAINER, *records], num_stages)
    return result, {problem.kind: problem for problem in result.problems}


def test_a_stage_whose_replicas_are_all_gone() -> None:
    result, problems = found(*three(0))
    assert set(problems) == {"stage_empty"} and result.version is None
    text = problems["stage_empty"].text
    assert "stage 1 has lost all its replicas at step 41" in text and "swarmnet peer --stage 1" in text
    assert "with the --dir it had" in text and problems["stage_empty"].stage == 1


def test_a_stage_of_which_no_record_is_seen_is_not_lost_while_steps_are_made() -> None:
    _, problems = found(*(replace(each, step_s=1.0) for each in three(0)))
    assert problems["stage_empty"].severity == "note" and "not been seen yet" in problems["stage_empty"].text
    _, problems = found(*(replace(each, step_s=1.0) for each in three(0, still_s=30)))
    assert problems["stage_empty"].severity == "error" and "lost all its replicas" in problems["stage_empty"].text


def test_who_leaves_after_the_last_step_is_not_missed() -> None:
    stays = [replace(each, finished=True) for each in three(0)]
    result, problems = found(*stays)
    assert result.finished and not problems
    result, problems = found(*stays, *three(1))
    assert not result.finished and not problems, "stage 1 has steps to do"


def test_everybody_has_left_is_said_once_and_how_to_go_on() -> None:
    gone = [*three(0, disk=(30, 40), synced=False, draining=True), *three(1, disk=(40,), synced=False, draining=True)]
    result = assess(RUN, [replace(TRAINER, finished=True), *gone], 2)
    text = "all peers have left: start them again, each with the same --dir, and the run goes on from version 40"
    assert [(each.kind, each.text) for each in result.problems] == [("all_left", text)]
    assert "all_left" not in found(*gone[1:], record("0-0", status(0, draining=True)))[1], "one is still about to"
    assert "all_left" not in found(*(replace(each, paused=True) for each in gone))[1]


def test_newcomers_without_its_state_do_not_bring_a_stage_back() -> None:
    joiner = record("j", status(1, 0, synced=False))
    _, problems = found(*three(0), joiner)
    assert set(problems) == {"stage_not_synced", "single_replica"}
    assert "no peer here has its state" in problems["stage_not_synced"].text


def test_a_checkpoint_on_a_disk_is_enough_to_go_on_from() -> None:
    _, problems = found(*three(0, disk=(30, 40)), record("j", status(1, 0, synced=False, disk=(40,))))
    assert "the run goes on from version 40 by itself" in problems["stage_not_synced"].text
    _, problems = found(*three(0, disk=(30,)), record("j", status(1, 0, synced=False, disk=(40,))))
    text = problems["stage_not_synced"].text
    assert "version 40 on disk" in text and "the --dir that it had" in text


def test_a_stage_that_writes_no_checkpoints_is_named() -> None:
    def kinds(*disk: int) -> list[str]:
        others = (record(name, status(stage, 60, disk=(50, 60))) for stage, name in ((1, "b"), (2, "c")))
        _, problems = found(record("a", status(0, 60, disk=disk)), *others)
        named = [each for each in problems.values() if each.kind == "no_checkpoint"]
        return [f"{each.stage}: {each.text.partition(', and')[0]}" for each in named]

    assert kinds() == ["0: stage 0 has no checkpoint"]
    assert kinds(10, 20) == ["0: stage 0 has no checkpoint newer than version 20"]
    assert not kinds(40) and not kinds(40, 50), "the next one may be on its way"
    assert not kinds(0, 40), "its disk is slow: it writes every fourth one"


def test_a_run_that_has_not_begun_has_lost_nothing() -> None:
    _, problems = found(*three(0, version=0))
    assert "no peer serves stage 1" in problems["stage_empty"].text
    _, problems = found(*three(0, version=0), record("j", status(1, 0, synced=False)))
    assert "wait for one to be ready" in problems["stage_not_synced"].text


def test_what_every_stage_has_on_disk_is_said() -> None:
    result, problems = found(*three(0, disk=(20, 30, 40)), *three(1, disk=(30,)))
    assert (result.on_disk, problems) == (30, {})
    assert found(*three(0, disk=(20,)), *three(1))[0].on_disk is None


def test_a_run_that_went_back_says_so_and_who_has_yet_to_follow() -> None:
    after = [replace(each, restart=BACK) for each in (*three(0), *three(1))]
    result, problems = found(*after)
    assert result.restart == BACK and set(problems) == {"went_back"} and problems["went_back"].severity == "note"
    assert "restarted once, last from version 40" in problems["went_back"].text
    assert "yet to follow" not in problems["went_back"].text

    old = record("old", status(1, 60, chain=Chain("d")))
    result, problems = found(*after, old)
    assert result.version == 41 and "1 peer has yet to follow" in problems["went_back"].text
    _, problems = found(*[replace(each, restart=BACK) for each in three(0)], *three(1))
    assert "stage_not_synced" in problems  # of another history: not what the run goes on with


def test_a_restart_that_one_peer_makes_up_is_not_the_runs() -> None:
    liar = replace(record("liar", status(0, 7)), restart=Restart(900, 0))
    result, problems = found(*three(0), *three(1), liar)
    assert result.restart == NO_RESTART and "went_back" not in problems


def test_chains_of_different_restarts_are_no_fork() -> None:
    other = replace(record("x", status(0, chain=Chain("d"))), restart=BACK)
    assert "fork" not in found(*three(0), *three(1), other)[1]
    assert "fork" in found(*three(0), *three(1), record("x", status(0, chain=Chain("d"))))[1]


def test_those_who_come_and_go() -> None:
    joiner, leaver = record("j", status(1, 0, synced=False)), record("l", status(1, draining=True))
    _, problems = found(*three(0), *three(1), joiner, leaver)
    assert set(problems) == {"joining", "leaving"}
    assert "1 replica of stage 1 is fetching its state" in problems["joining"].text
    assert "1 replica of stage 1 is about to leave" in problems["leaving"].text
    _, problems = found(*three(0), *three(1)[:2], leaver)
    assert set(problems) == {"leaving", "two_replicas"}
    _, problems = found(*three(0), leaver)
    assert set(problems) == {"all_leaving"} and problems["all_leaving"].severity == "warning"


def test_those_who_pause_are_not_counted_on() -> None:
    idle = [replace(record(name, status(1, draining=True)), paused=True) for name in "pq"]
    result, problems = found(*three(0), *three(1), *idle)
    assert set(problems) == {"paused"} and "2 replicas of stage 1 are paused" in problems["paused"].text
    assert [replica.state for replica in result.stages[1].replicas].count("paused") == 2
    _, problems = found(*three(0), *idle, record("l", status(1, draining=True)))
    assert set(problems) == {"paused", "all_paused"} and problems["all_paused"].severity == "warning"


def test_the_states_in_a_word() -> None:
    joiner, leaver = status(0, synced=False), status(0, draining=True)
    result, _ = found(record("a", status(0)), record("b", joiner), record("c", leaver))
    assert [line.state for line in result.stages[0].replicas] == ["synced", "joining", "leaving"]


def test_who_began_at_the_seed_when_others_had_got_further_has_no_state() -> None:
    fresh = [record("x", status(1, 0)), record("y", status(1, 0))]
    result, problems = found(*three(0, disk=(30, 40)), *fresh)
    assert problems["stage_not_synced"].stage == 1 and result.version is None
    assert "no peer here has its state" in problems["stage_not_synced"].text
    _, problems = found(*three(0, version=0), *three(1, version=0))
    assert problems == {}  # so does every run begin
    _, problems = found(*three(0, disk=(40,)), record("x", status(1, 0, disk=(40,))), *fresh)
    assert "stage_not_synced" not in problems  # its record is older than its checkpoint
    back = [replace(each, restart=Restart(1, 0)) for each in (*three(0, version=0, disk=(40,)), *fresh)]
    assert "stage_not_synced" not in found(*back)[1]  # the run went back to the seed


def test_the_note_about_two_replicas_is_said_once() -> None:
    twos = [record(f"{stage}-{number}", status(stage)) for stage in range(3) for number in range(2)]
    result, problems = found(*twos, num_stages=3)
    assert [problem.kind for problem in result.problems] == ["two_replicas"]
    assert problems["two_replicas"].stage is None and "stages 0, 1, 2 have two" in problems["two_replicas"].text
    result, problems = found(*twos[:4], *three(2), num_stages=3)
    assert "stages 0, 1 have" in problems["two_replicas"].text
    _, problems = found(*twos[:2], *three(1))
    assert problems["two_replicas"].stage == 0 and "stage 0 has two replicas" in problems["two_replicas"].text


def test_what_is_computed_twice_shows() -> None:
    once = [
        record(f"{stage}-{number}", status(stage, executions=8, counted=8)) for stage in range(2) for number in range(2)
    ]
    assert found(*once)[0].executions_per_index == 1.0
    twice = record("x", status(1, executions=8, counted=0))
    assert found(*once, twice)[0].executions_per_index == 1.25
    assert found(*three(0), *three(1))[0].executions_per_index == 0.0


def test_a_replica_that_has_drifted_is_named() -> None:
    odd = record("odd", status(0, drift=40, stray=True))
    rest = [record(f"r{number}", status(0, drift=40)) for number in range(2)]
    result, problems = found(odd, *rest, *three(1))
    problem = problems["drift"]
    assert problem.severity == "warning" and problem.stage == 0
    assert "odd in stage 0" in problem.text and "version 40:" in problem.text
    assert [line.drift for line in result.stages[0].replicas] == [40, 40, 40]
    _, problems = found(*rest, *three(1))
    assert "drift" not in problems


def waiting(stage: int, name: str, *complaints: Complaint, still_s: int = 34) -> Record:
    return record(name, status(stage, still_s=still_s), complaints=complaints)


def against(peer: str, how: str, reason: str = "", seconds: int = 0) -> Complaint:
    return Complaint(0, PeerId(peer), how, reason, seconds)  # type: ignore[arg-type]


def test_a_run_that_stands_still_says_for_whom_it_waits_and_why() -> None:
    unreached, waited = against("P", "unreached"), against("P", "waited_for", "does not report")
    others = three(1, still_s=34)
    replicas = [waiting(0, "A", waited, unreached), waiting(0, "B", unreached), waiting(0, "P")]
    result, problems = found(*replicas, *others)
    assert problems["standstill"].text == "no step for 34 s: waiting for P of stage 0, which no peer can connect to"
    assert result.problems[0].kind == "standstill" and result.still_s == 34 and "unreached" not in problems

    _, problems = found(waiting(0, "A", waited, unreached), *replicas[2:], waiting(0, "B"), *others)
    assert problems["standstill"].text.endswith("P of stage 0, which ...A cannot connect to")
    _, problems = found(waiting(0, "A", waited), *replicas[2:], waiting(0, "B"), *others)
    assert problems["standstill"].text.endswith("P of stage 0 (does not report, says ...A)")
    _, problems = found(waiting(0, "A", unreached), *replicas[1:], *others)
    perhaps = "no step for 34 s, perhaps because of P of stage 0, which no peer can connect to"
    assert problems["standstill"].text == perhaps
    cut_off = waiting(0, "P", against("A", "waited_for", "has not got the sum"))
    assert found(waiting(0, "A", unreached), cut_off, *others)[1]["standstill"].text == perhaps
    _, problems = found(*(waiting(0, name) for name in "ABC"), *others)
    assert problems["standstill"].text == "no step for 34 s, and no peer reports which one it waits for"
    assert "standstill" not in found(*(waiting(0, name) for name in "ABC"))[1], "stage 1 is missing, which is said"


def test_who_is_left_out_or_sits_out_is_named_and_by_whom() -> None:
    complaints = (
        against("P", "left_out", "late", 3),
        against("Q", "sits_out", "does not report", 120),
        against("R", "unreached"),
        against("R", "left_out", "nobody here can connect to it"),
    )
    result, problems = found(waiting(0, "A", *complaints, still_s=0), *three(0), *three(1))
    assert problems["left_out"].text == "left out: P of stage 0 (late, says ...A)"
    assert problems["sits_out"].text == "suspended for another 120 s: Q of stage 0 (does not report, says ...A)"
    assert problems["unreached"].text.startswith("left out: R of stage 0, which ...A cannot connect to")
    assert len(result.complaints) == 4 and not result.still_s


def test_a_minority_can_say_neither_that_a_run_stands_still_nor_anything_of_stages_it_does_not_serve() -> None:
    liar = waiting(1, "L", against("0-0", "waited_for", "is late"), still_s=9999)
    result, problems = found(liar, *three(0), *three(1))
    assert not problems and not result.still_s and not result.complaints
    many = (against(f"P{number}", "left_out", "late") for number in range(99))
    result, _ = found(waiting(0, "L", *many, still_s=9999), *three(0), *three(1))
    assert len(result.problems) == 16 and not result.still_s


def test_steps_with_false_work_are_named_with_how_many_say_so() -> None:
    known = [replace(each, tainted=(TaintedStep(1, 7), TaintedStep(0, 9)), num_tainted=6) for each in three(0)]
    liar = replace(three(1)[0], tainted=(TaintedStep(0, 3),), num_tainted=1 << 50)
    result, problems = found(*known, liar, *three(1)[1:])
    assert result.num_tainted == 6 and [(each.stage, each.step, each.by) for each in result.tainted] == [
        (0, 9, 3),
        (1, 7, 3),
        (0, 3, 1),
    ]
    assert problems["tainted"].severity == "warning"
    assert problems["tainted"].text.startswith(
        "6 steps hold work that is proven false; the last: step 9 of stage 0 (say 3 of 6 replicas), step 7 of stage 1"
    )
    assert 'they stay in the weights (audit.on_late = "record")' in problems["tainted"].text
    _, problems = found(*(replace(each, goes_back=True) for each in known), *three(1))
    assert 'the run goes back before them by itself (audit.on_late = "rollback")' in problems["tainted"].text
    assert not found(*three(0), *three(1))[0].num_tainted


def convicting(records: list[Record], liar: str, reason: str = "step 7, microbatch 3: false") -> list[Record]:
    complaint = Complaint(0, PeerId(liar), "convicted", reason, 9)
    return [each if each.peer == liar else replace(each, complaints=(complaint,)) for each in records]


def test_a_convict_is_shown_as_one_in_one_line_and_what_it_says_counts_for_nothing() -> None:
    plain = [*three(0), *three(1)]
    says = (against("0-1", "left_out", "late", 3), against("0-1", "convicted", "it lies"))
    liar = waiting(0, "0-0", *says, still_s=0)
    liar = replace(liar, eval_loss=(41, 0.1), tainted=(TaintedStep(0, 3),), num_tainted=9)
    result, problems = found(*convicting([liar, *plain[1:]], "0-0"))
    assert [(each.peer, each.stages, each.by) for each in result.convicts] == [("0-0", (0,), 5)]
    assert [replica.state for replica in result.stages[0].replicas] == ["convicted", "synced", "synced"]
    line = "banned: 0-0 of stage 0 (step 7, microbatch 3: false), as 5 of 5 replicas say"
    assert [each.text for each in result.problems if each.severity == "warning"] == [line]
    assert set(problems) == {"convicted", "two_replicas"}, "of three one is no replica any more"
    assert result.eval_loss is None and not result.num_tainted
    assert all(each.by != "0-0" for each in result.complaints)


def test_whom_a_minority_calls_convicted_is_not() -> None:
    liars = [replace(each, complaints=(against("0-0", "convicted", "it lies"),)) for each in three(0)[1:]]
    result, problems = found(three(0)[0], *liars, *three(1))
    assert not result.convicts and result.stages[0].replicas[0].state == "synced"
    assert problems["convicted"].text == "banned: 0-0 of stage 0 (it lies, say ...0-1, ...0-2)"
    gone, _ = found(*convicting([*three(0), *three(1)], "gone"))
    assert [(each.peer, each.stages, each.by) for each in gone.convicts] == [("gone", (), 6)]


def test_disputes_are_counted_by_stage_and_the_last_is_named() -> None:
    last, before = DisputedWork(1, 9, PeerId("0-2")), DisputedWork(1, 7, PeerId("1-1"))
    told = [replace(each, disputed=last, num_disputed=2) for each in three(1)[:2]]
    late = replace(three(1)[2], disputed=before, num_disputed=1)
    liar = replace(three(0)[0], disputed=DisputedWork(1, 1 << 50, PeerId("1-0")), num_disputed=1 << 50)
    result, problems = found(liar, *three(0)[1:], *told, late)
    assert [(each.number, each.last, each.by) for each in result.disputes] == [
        (2, last, 3)
    ] and result.num_disputed == 2
    assert problems["disputed"].severity == "warning" and problems["disputed"].stage == 1
    assert problems["disputed"].text.startswith(
        "in 2 cases of stage 1 a peer is at fault and none can be named, as 3 of 6 replicas say; the last: work of 0-2 "
        "in step 9: it takes more than half of the replicas"
    )
    result, problems = found(*convicting([*three(0), *told, late], "0-2"))
    assert result.num_disputed == 1 and "work of 1-1" in problems["disputed"].text, "0-2 is named now"
    assert not found(*three(0), *three(1))[0].num_disputed


def test_how_long_it_will_take_and_how_fast_each_replica_is() -> None:
    rates = (Estimate(mark(PeerId("0-0")), 2000), Estimate(mark(PeerId("0-1")), 500))
    replicas = [
        replace(each, steps=100, step_s=step_s, estimates=rates if each.peer in ("0-0", "0-1") else ())
        for each, step_s in zip((*three(0), *three(1)), (1.0, 2.0, 2.0, 2.0, 3.0, 0.0), strict=True)
    ]
    result, _ = found(*replicas)
    assert (result.steps, result.step_s, result.eta_s) == (100, 2.0, 118.0)
    assert [each.speed for each in result.stages[0].replicas] == [2.0, 0.5, 0.0]

    still = [replace(each, stages=tuple(replace(status, still_s=30) for status in each.stages)) for each in replicas]
    assert found(*still)[0].eta_s is None
    assert found(*three(0), *three(1))[0].eta_s is None


def test_each_problem_has_a_severity() -> None:
    assert {text.partition(": ")[0] for text in _PROBLEMS.values()} == {"error", "warning", "note"}
