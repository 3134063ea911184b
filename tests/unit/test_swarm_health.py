"""What status makes of a run that lost a stage, went back, is joined and left: each in its own words.

`tests/data/swarm_health.txt` has what is assessed of each case below, every sentence in full. To write it again:
`python tests/unit/test_swarm_health.py`.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from swarmnet.directory import Complaint, DisputedWork, Estimate, Record, StageStatus, TaintedStep
from swarmnet.ids import Chain, OnDisk, PeerId, Restart, RunId
from swarmnet.peer.rates import mark
from swarmnet.peer.swarm_health import _PROBLEMS, Assessment, assess

RUN = RunId("ab" * 32)
TOLD = Path(__file__).parents[1] / "data/swarm_health.txt"


def record(name: str, *statuses: StageStatus, **changes: object) -> Record:
    return replace(Record(RUN, PeerId(name), 1, (), statuses, numerics="cpu"), **changes)


def status(stage: int, version: int = 41, disk: tuple[int, ...] = (), **changes: object) -> StageStatus:
    plain = StageStatus(stage, version, Chain("c"), synced=True, slots=4, disk=tuple(map(OnDisk, disk)))
    return replace(plain, **changes)


def some(stage: int, count: int = 3, **changes: object) -> list[Record]:
    return [record(f"{stage}-{number}", status(stage, **changes)) for number in range(count)]


def all_with(records: list[Record], **changes: object) -> list[Record]:
    return [replace(each, **changes) for each in records]


def waiting(stage: int, name: str, *complaints: Complaint, still_s: int = 34) -> Record:
    return record(name, status(stage, still_s=still_s), complaints=complaints)


def against(peer: str, how: str, reason: str = "", seconds: int = 0) -> Complaint:
    return Complaint(0, PeerId(peer), how, reason, seconds)  # type: ignore[arg-type]


def convicting(records: list[Record], liar: str) -> list[Record]:
    said = (against(liar, "convicted", "step 7, microbatch 3: false", 9),)
    return [each if each.peer == liar else replace(each, complaints=said) for each in records]


TRAINER, PLAIN = record("t", trainer=True), [*some(0), *some(1)]
JOINER, LEAVER = record("j", status(1, 0, synced=False)), record("l", status(1, draining=True))


def losses() -> Iterator[tuple[str, list[Record]]]:
    yield "all is well", PLAIN
    yield "all replicas of a stage are gone", some(0)
    yield "steps are made: no record of stage 1 was seen, and it is not lost", all_with(some(0), step_s=1.0)
    yield "no steps are made any more", all_with(some(0, still_s=30), step_s=1.0)
    stays = all_with(some(0), finished=True)
    yield "who leaves after the last step is not missed", stays
    yield "stage 1 has steps to do", [*stays, *some(1)]
    gone = [each for stage, disk in ((0, (30, 40)), (1, (40,))) for each in some(stage, disk=disk, synced=False)]
    gone = [replace(each, stages=(replace(each.stages[0], draining=True),)) for each in gone]
    yield "all have left", gone
    yield "one is still about to leave", [*gone[1:], record("0-0", status(0, draining=True))]
    yield "all are paused", all_with(gone, paused=True)
    yield "newcomers without its state do not bring a stage back", [*some(0), JOINER]
    with_disk = record("j", status(1, 0, synced=False, disk=(40,)))
    yield "a checkpoint on a disk is enough to go on from", [*some(0, disk=(30, 40)), with_disk]
    yield "the other stage has none of that version", [*some(0, disk=(30,)), with_disk]
    for disk, why in (
        ((), "a stage writes no checkpoints"),
        ((10, 20), "a stage has stopped to write them"),
        ((40,), "the next one may be on its way"),
        ((40, 50), "it has the last but one"),
        ((0, 40), "its disk is slow: it writes every fourth one"),
    ):
        yield why, [record("a", status(0, 60, disk=disk)), record("b", status(1, 60, disk=(50, 60)))]
    yield "a run that has not begun has lost nothing", some(0, version=0)
    yield "nor when one fetches its state", [*some(0, version=0), JOINER]
    yield "so does every run begin", [*some(0, version=0), *some(1, version=0)]
    yield "every stage has a version on disk", [*some(0, disk=(20, 30, 40)), *some(1, disk=(30,))]
    yield "one stage has none", [*some(0, disk=(20,)), *some(1)]
    fresh = [record("x", status(1, 0)), record("y", status(1, 0))]
    yield "who began at the seed when others had got further has no state", [*some(0, disk=(30, 40)), *fresh]
    late = record("x", status(1, 0, disk=(40,)))
    yield "its record is older than its checkpoint", [*some(0, disk=(40,)), late, *fresh]
    back = [*some(0, version=0, disk=(40,)), *fresh]
    yield "the run went back to the seed", all_with(back, restart=Restart(1, 0))


def restarts() -> Iterator[tuple[str, list[Record]]]:
    back = Restart(1, 40)
    yield "a run went back", all_with(PLAIN, restart=back)
    yield "one has yet to follow", [*all_with(PLAIN, restart=back), record("old", status(1, 60, chain=Chain("d")))]
    yield "a stage of another history is not what the run goes on with", [*all_with(some(0), restart=back), *some(1)]
    yield "one peer makes up a restart", [*PLAIN, replace(record("liar", status(0, 7)), restart=Restart(900, 0))]
    other = record("x", status(0, chain=Chain("d")))
    yield "chains of different restarts are no fork", [*PLAIN, replace(other, restart=back)]
    yield "chains of one are", [*PLAIN, other]


def comings() -> Iterator[tuple[str, list[Record]]]:
    yield "one joins and one leaves", [*PLAIN, JOINER, LEAVER]
    yield "who leaves is counted on no more", [*some(0), *some(1, 2), LEAVER]
    yield "the last one leaves", [*some(0), LEAVER]
    idle = [replace(record(name, status(1, draining=True)), paused=True) for name in "pq"]
    yield "who pauses is not counted on", [*PLAIN, *idle]
    yield "all others leave", [*some(0), *idle, LEAVER]
    yield "two replicas each", [*some(0, 2), *some(1, 2)]
    yield "two replicas of one stage", [*some(0, 2), *some(1)]
    once = [*some(0, 2, executions=8, counted=8), *some(1, 2, executions=8, counted=8)]
    yield "all is computed once", once
    yield "some is computed twice", [*once, record("x", status(1, executions=8, counted=0))]
    drifted = [record(f"r{number}", status(0, drift=40)) for number in range(2)]
    yield "all agree on version 40", [*drifted, *some(1)]
    yield "one has drifted", [record("odd", status(0, drift=40, stray=True)), *drifted, *some(1)]
    rates = (Estimate(mark(PeerId("0-0")), 2000), Estimate(mark(PeerId("0-1")), 500))
    paces = [
        replace(each, steps=100, step_s=step_s, estimates=rates if each.peer in ("0-0", "0-1") else ())
        for each, step_s in zip(PLAIN, (1.0, 2.0, 2.0, 2.0, 3.0, 0.0), strict=True)
    ]
    yield "how long it will take and how fast each replica is", paces
    still = [replace(each, stages=(replace(each.stages[0], still_s=30),)) for each in paces]
    yield "no end is in sight while it stands still", still


def complaints() -> Iterator[tuple[str, list[Record]]]:
    unreached, waited = against("P", "unreached"), against("P", "waited_for", "does not report")
    others, p = some(1, still_s=34), waiting(0, "P")
    a, b = waiting(0, "A", waited, unreached), waiting(0, "B", unreached)
    yield "it waits for one that nobody reaches", [a, b, p, *others]
    yield "it waits for one that some reach", [a, p, waiting(0, "B"), *others]
    yield "it waits for one that does not report", [waiting(0, "A", waited), p, waiting(0, "B"), *others]
    yield "perhaps it waits for it", [waiting(0, "A", unreached), b, p, *others]
    cut_off = waiting(0, "P", against("A", "waited_for", "has not got the sum"))
    yield "what one says that is cut off itself", [waiting(0, "A", unreached), cut_off, *others]
    yield "nobody says why it stands still", [*(waiting(0, name) for name in "ABC"), *others]
    yield "stage 1 is missing, which is said", [waiting(0, name) for name in "ABC"]
    excluded = (
        against("P", "left_out", "late", 3),
        against("Q", "sits_out", "does not report", 120),
        against("R", "unreached"),
        against("R", "left_out", "nobody here can connect to it"),
    )
    yield "some are excluded", [waiting(0, "A", *excluded, still_s=0), *PLAIN]
    of_others = waiting(1, "L", against("0-0", "waited_for", "is late"), still_s=9999)
    yield "a minority says that it stands still, and complains of another stage", [of_others, *PLAIN]
    many = [against(f"P{number}", "left_out", "late") for number in range(99)]
    yield "one complains of a hundred", [waiting(0, "L", *many, still_s=9999), *PLAIN]


def faults() -> Iterator[tuple[str, list[Record]]]:
    known = all_with(some(0), tainted=(TaintedStep(1, 7), TaintedStep(0, 9)), num_tainted=6)
    false = replace(some(1)[0], tainted=(TaintedStep(0, 3),), num_tainted=1 << 50)
    yield "steps hold false work; one makes some up", [*known, false, *some(1)[1:]]
    yield "the run goes back before them", [*all_with(known, goes_back=True), *some(1)]
    says = (against("0-1", "left_out", "late", 3), against("0-1", "convicted", "it lies"))
    liar = replace(waiting(0, "0-0", *says, still_s=0), eval_loss=(41, 0.1), tainted=false.tainted, num_tainted=9)
    yield "what a banned peer says counts for nothing", convicting([liar, *PLAIN[1:]], "0-0")
    accusing = all_with(some(0)[1:], complaints=(against("0-0", "convicted", "it lies"),))
    yield "a minority bans nobody", [some(0)[0], *accusing, *some(1)]
    yield "a banned peer has gone", convicting(PLAIN, "gone")
    last, before = DisputedWork(1, 9, PeerId("0-2")), DisputedWork(1, 7, PeerId("1-1"))
    told = [*all_with(some(1)[:2], disputed=last, num_disputed=2)]
    told.append(replace(some(1)[2], disputed=before, num_disputed=1))
    made_up = replace(some(0)[0], disputed=DisputedWork(1, 1 << 50, PeerId("1-0")), num_disputed=1 << 50)
    yield "disputes are counted by stage; one makes some up", [made_up, *some(0)[1:], *told]
    yield "one of the disputed is banned by now", convicting([*some(0), *told], "0-2")


def in_words(found: Assessment) -> Iterator[str]:
    """What differs from a run without any news."""
    plain = Assessment(RUN, seen=True, num_stages=2)
    apart = {"stages", "trainers", "problems", "admission", "complaints", "contributors"}
    values = {field.name: getattr(found, field.name) for field in fields(found) if field.name not in apart}
    told = [f"{name} {value}" for name, value in values.items() if value != getattr(plain, name)]
    told += [f"{len(found.complaints)} complaints"] if found.complaints else []
    yield f"  {', '.join(told) or 'no news'}"
    for each in (line for stage in found.stages for line in stage.replicas):
        if (each.state, each.speed, each.drift) != ("synced", 0.0, None):
            yield f"  {each.peer} {each.state}, speed {each.speed:g}, drift {each.drift}"
    for problem in found.problems:
        yield f"  {problem.severity} {problem.kind}, stage {problem.stage}: {problem.text}"


def assessed() -> str:
    lines: list[str] = []
    for cases in (losses, restarts, comings, complaints, faults):
        for name, records in cases():
            lines += [name, *in_words(assess(RUN, [TRAINER, *records], 2))]
    finished = all_with([TRAINER], finished=True)
    (gone,) = (records for name, records in losses() if name == "all have left")
    lines += ["all have left, and the trainer is done", *in_words(assess(RUN, [*finished, *gone], 2))]
    twos = [each for stage in range(3) for each in some(stage, 2)]
    lines += ["three stages of two are one note", *in_words(assess(RUN, [TRAINER, *twos], 3))]
    lines += ["two of three", *in_words(assess(RUN, [TRAINER, *twos[:4], *some(2)], 3))]
    return "\n".join(lines) + "\n"


def test_each_case_is_assessed_and_told_as_it_was() -> None:
    assert assessed() == TOLD.read_text(encoding="utf-8")


def test_each_problem_has_a_severity() -> None:
    assert {text.partition(": ")[0] for text in _PROBLEMS.values()} == {"error", "warning", "note"}


if __name__ == "__main__":
    TOLD.write_text(assessed(), encoding="utf-8")
