"""What the dashboard shows: what `watch` believes, who came and went, what each peer says of itself; within bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swarmnet.directory import Complaint, Record, StageStatus
from swarmnet.ids import Chain, PeerId, Restart, RunId
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.page import LONGEST_NAME, MOST_COMPLAINTS, MOST_PEERS, MOST_POINTS, columns, page
from swarmnet.monitor.state import MOST_STAYS, WatchedRun
from swarmnet.peer.swarm_health import assess
from swarmnet.telemetry.figures import StepFigures
from swarmnet.telemetry.run_state import StepPoint

RUN = RunId("ab" * 32)


def record(name: str, stage: int | None = 0, *, executions: int = 0, counted: int = 0, **changes: Any) -> Record:
    status = StageStatus(stage or 0, 5, Chain("c"), synced=True, slots=4, executions=executions, counted=counted)
    plain = Record(RUN, PeerId(name), 1, ("/ip4/192.0.2.1/tcp/1",), () if stage is None else (status,), steps=9)
    return replace(plain, trainer=stage is None, **changes)


def leaving(name: str) -> Record:
    plain = record(name)
    return replace(plain, stages=(replace(plain.stages[0], draining=True),))


class Looks:
    """A page that is told one look after the other, two seconds apart."""

    def __init__(self, curve: Curve | None = None) -> None:
        self.now, self.curve = 1000.0, curve or Curve()
        self.seen = WatchedRun(self.curve, now=1000.0)

    def look(self, *records: Record, num_stages: int = 1) -> dict[str, Any]:
        self.now += 2
        self.seen.look(assess(RUN, records, num_stages), now=self.now)
        data = page(self.seen, now=self.now)
        json.dumps(data, allow_nan=False)
        return data

    def stays(self, *records: Record) -> Sequence[tuple[str, bool, str]]:
        """Who, whether it joined while we looked, and how it ended."""
        return [(each["peer"], each["began"] is not None, each["how"]) for each in self.look(*records)["stays"]]


def test_a_step_about_which_members_disagree_is_not_on_the_page() -> None:
    looks = Looks()
    said = {PeerId(name): {0: StepFigures(0, loss, 8, 0.5, 1e-3, 1.0)} for name, loss in (("a", 8.0), ("l", 1.0))}
    looks.curve.settle(said, now=1000.0, replicas="2", live_s=5.0)
    data = looks.look(record("a"), record("l", loss=(0, 0.125)))
    assert data["disputed"] == 0 and data["curve"]["x"] == [] and data["loss"] is None


def test_who_was_there_who_joins_who_leaves_and_who_is_gone_without_a_word() -> None:
    looks, a, b, c = Looks(), record("a"), record("b"), record("c")
    assert looks.stays(a, b) == [("a", False, ""), ("b", False, "")]
    assert looks.stays(a, b, c)[2] == ("c", True, "")
    looks.look(a, leaving("b"), c)
    assert looks.stays(a) == [("a", False, ""), ("b", False, "left"), ("c", True, "gone")]
    assert [each["kind"] for each in looks.look(a)["marks"]] == ["joined", "left", "gone"]


def test_who_is_started_again_between_two_looks_has_a_second_stay() -> None:
    looks = Looks()
    looks.look(record("a"), record("b"))
    data = looks.look(record("a"), record("b", incarnation=2))
    assert [each["kind"] for each in data["marks"]] == ["restarted"]
    assert [(each["peer"], each["how"]) for each in data["stays"]] == [("a", ""), ("b", "gone"), ("b", "")]
    assert not looks.look(record("a"), record("b", incarnation=2))["marks"][1:]


def test_a_trainer_that_goes_has_left_and_a_run_that_goes_back_is_marked() -> None:
    looks = Looks(Curve([StepPoint(4, 1.0, 8, 0.0, 0.5, 1e-3)]))
    looks.look(record("a"), record("t", None))
    data = looks.look(record("a", restart=Restart(1, 2)))
    assert [(each["kind"], each["step"]) for each in data["marks"]] == [("went_back", 4), ("left", 4)]
    assert data["stays"][0]["stage"] == -1


def test_a_replicas_pace_is_that_of_its_executions_and_ends_with_them() -> None:
    looks = Looks()

    def pace(executions: int) -> float:
        return looks.look(record("a", executions=executions))["peers"]["a"]["stages"][0]["per_second"]

    assert pace(0) == 0.0 and pace(8) == 4.0
    assert pace(4) == 0.0, "it was started again"
    assert pace(12) == 4.0
    for _ in range(20):
        last = pace(12)
    assert last == 0.0


def test_contribution_is_a_share_of_its_stage() -> None:
    peers = looks_of(record("a", counted=3), record("b", counted=1), record("c", 1))["peers"]
    shares = {peer: each["stages"][0]["share"] for peer, each in peers.items()}
    assert shares == {"a": 0.75, "b": 0.25, "c": None}


def looks_of(*records: Record) -> dict[str, Any]:
    return Looks().look(*records, num_stages=2)


def test_contributors_are_shown_with_their_share_of_the_run() -> None:
    data = looks_of(record("a", counted=3, nickname="rig"), record("b", counted=1), record("c", 1, counted=2))
    assert [(each["peer"], each["accepted"], each["share"]) for each in data["contributors"]] == [
        ("a", 3, 3 / 6),
        ("c", 2, 2 / 6),
        ("b", 1, 1 / 6),
    ]


def test_a_peer_has_its_nickname_region_and_the_name_of_its_device() -> None:
    gpu = "NVIDIA H100 80GB HBM3/torch-2.13.0 cuda-13.0/tp2/bf16/eager/bdac02c7"
    cpu = "cpu AVX512+0badcafe/torch-2.13.0/1/fp32/eager/bdac02c7"
    records = record("a", numerics=gpu, nickname="rig", region="eu"), record("b", numerics=cpu), record("c")
    peers = looks_of(*records)["peers"]
    assert [(each["nickname"], each["region"], each["device"]) for each in peers.values()] == [
        ("rig", "eu", "NVIDIA H100 80GB HBM3"),
        ("", "", "cpu AVX512"),
        ("", "", ""),
    ]


def test_the_runs_name_is_shown_and_bounded() -> None:
    looks = Looks()
    assert looks.look(record("a"))["name"] == ""
    looks.seen.name = "n" * 1000
    assert looks.look(record("a"))["name"] == "n" * LONGEST_NAME


def test_complaints_are_with_both_and_bounded() -> None:
    said = Complaint(0, PeerId("b"), "unreached", "no answer")
    peers = looks_of(record("a", complaints=(said,)), record("b"), record("c", 1))["peers"]
    assert [each["about"] for each in peers["a"]["complaints"]] == ["b"] == [peers["a"]["complaints"][0]["about"]]
    assert peers["b"]["complaints"] == peers["a"]["complaints"] and not peers["c"]["complaints"]
    many = [record(f"x{number}", complaints=(said,)) for number in range(2 * MOST_COMPLAINTS)]
    assert len(looks_of(record("b"), *many)["peers"]["b"]["complaints"]) == MOST_COMPLAINTS


def test_of_a_crowd_each_stage_is_shown_and_how_many_there_are() -> None:
    crowd = [record(f"p{number:04}", stage=0) for number in range(2 * MOST_PEERS)]
    data = looks_of(*crowd, record("only", 1))
    assert len(data["peers"]) == MOST_PEERS and "only" in data["peers"]
    assert [(each["replicas"], each["synced"]) for each in data["stages"]] == [(2 * MOST_PEERS, 2 * MOST_PEERS), (1, 1)]
    assert sum(len(each["peers"]) for each in data["stages"]) == MOST_PEERS


def test_of_many_who_came_and_went_the_last_are_shown_and_all_who_are_here() -> None:
    looks = Looks()
    for number in range(MOST_STAYS + 20):
        data = looks.look(record("a"), record(f"p{number}"))
    assert len(data["stays"]) <= MOST_STAYS
    assert [each["peer"] for each in data["stays"] if not each["how"]] == ["a", f"p{MOST_STAYS + 19}"]


def test_a_long_curve_is_thinned_and_keeps_its_spikes() -> None:
    points = [StepPoint(step, 50.0 if step == 77_777 else 1.0, 8, step, 0.5, 1e-3) for step in range(100_000)]
    thin = columns(Curve(points))
    assert len(thin["x"]) <= MOST_POINTS + 2 and thin["x"][-1] == 99_999 and max(filter(None, thin["loss"])) == 50.0
    assert thin["tokens_per_second"][0] is None and thin["tokens_per_second"][-1] == 8.0


def test_held_out_losses_stand_at_the_version_that_they_are_of() -> None:
    curve = Curve([StepPoint(step, 1.0, 8, step, 0.5, 1e-3) for step in range(3)])
    curve.evaluated({0: 5.0, 3: 2.0}, steps=9)
    assert columns(curve)["x"] == [0, 1, 2, 3] and columns(curve)["held_out"] == [5.0, None, None, 2.0]
    assert columns(curve)["loss"] == [1.0, 1.0, 1.0, None]


def test_tokens_are_those_that_made_the_weights_of_a_step_and_unknown_steps_count_as_the_next_one() -> None:
    # Steps 0, 1 and 3 are not known; version 6 is after the last step that is.
    curve = Curve([StepPoint(step, 1.0, 10 * step, 100.0 + step, 0.5, 1e-3) for step in (2, 4)])
    curve.evaluated({0: 5.0, 3: 4.0, 6: 3.0}, steps=9)
    found = columns(curve)
    assert found["x"] == [0, 2, 3, 4, 6]
    assert found["tokens"] == [0, 40, 60, 100, 180]
    assert found["time"] == [102.0, 102.0, 102.0, 104.0, 104.0]


def test_held_out_losses_of_a_run_without_known_steps_have_no_tokens_or_time() -> None:
    curve = Curve()
    curve.evaluated({0: 5.0, 3: 4.0}, steps=9)
    assert (columns(curve)["tokens"], columns(curve)["time"]) == ([0, 0], [0.0, 0.0])
