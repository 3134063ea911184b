"""A watch over members that lie, are mute or have left: what it shows, and how it ends. On virtual time, no network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from swarmnet.directory import Complaint, DisputedWork, Record, StageStatus
from swarmnet.errors import PeerGone, RejectCode, UsageError
from swarmnet.ids import Chain, PeerId, Restart, RunId
from swarmnet.manifest.file import run_id, to_toml
from swarmnet.manifest.schema import Admission, Manifest
from swarmnet.messages import Answer, Busy, History, HistoryRequest, ManifestData, ManifestRequest, Rejected, Request
from swarmnet.monitor import run as monitor_run
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.files import CsvFile
from swarmnet.monitor.run import GONE_S, Watcher, WatchOptions
from swarmnet.monitor.state import Change, WatchedRun
from swarmnet.monitor.view import JsonLines, WatchScreen, WatchView
from swarmnet.net.admission import Admissions
from swarmnet.net.identity import Identity
from swarmnet.peer.status import Observer, Waiting
from swarmnet.peer.swarm_health import assess
from swarmnet.telemetry.figures import MAX_FIGURES, Evaluation, StepFigures
from swarmnet.telemetry.spans import StepTimes
from swarmnet.testing.doubles import run_virtual

RUN = RunId("ab" * 32)
Answering = Callable[[HistoryRequest], Answer]


def record(name: str, stage: int | None, version: int = 5, **changes: object) -> Record:
    status = () if stage is None else (StageStatus(stage, version, Chain("c"), synced=True, slots=4),)
    plain = Record(RUN, PeerId(name), 1, (f"at {name}",), status, trainer=stage is None, steps=6, numerics="cpu")
    return replace(plain, **changes)  # type: ignore[arg-type]


def honest(request: HistoryRequest, steps: int = 6) -> History:
    known = [StepFigures(step, 8.0 - step, 8, 0.5, 1e-3, 10.0 - step) for step in range(request.since, steps)]
    return History(tuple(known[:MAX_FIGURES]))


def lying(request: HistoryRequest) -> History:
    return History(tuple(StepFigures(step, 1.0, 8, 0.5, 1e-3, 0.0) for step in range(request.since, 6)))


def evaluating(request: HistoryRequest) -> History:
    return History((), tuple(Evaluation(version, 0.5) for version in (3, 6) if version >= request.since))


class Members:
    """A transport to members that answer as told, and the directory that they are in."""

    num_stages = 1

    def __init__(self, answers: dict[str, Answering], *looks: list[Record], toml: str = "") -> None:
        """toml: the manifest, which all who answer give."""
        self._answers, self._looks, self._toml = answers, list(looks), toml
        self._admissions: Admissions | None = None
        self.asked: list[tuple[PeerId, int]] = []

    async def records(self) -> tuple[Record, ...]:
        found = self.known()
        self._looks = self._looks[1:] or self._looks
        return found

    def known(self) -> tuple[Record, ...]:
        admits = lambda each: self._admissions is None or self._admissions.admitted(each.peer, "stage", now=0.0)  # noqa: E731
        return tuple(each for each in self._looks[0] if admits(each))

    def learn(self, num_stages: int, admissions: Admissions) -> None:
        self._admissions = admissions

    async def call(
        self, peer: PeerId, request: Request, payload: object, *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        if isinstance(request, ManifestRequest) and peer in self._answers and self._toml:
            yield ManifestData(self._toml)
            return
        if not isinstance(request, HistoryRequest) or peer not in self._answers:
            raise PeerGone("nobody listens", peer=peer)
        self.asked.append((peer, request.since))
        yield self._answers[peer](request)


def watch(
    members: Members, options: WatchOptions, csv: CsvFile | None = None, run: RunId = RUN, view: WatchView | None = None
) -> int:
    async def story() -> int:
        until = asyncio.get_running_loop().time() + 10
        observer = Observer(run, cast(Any, members), None, until)
        shown = view or (JsonLines() if options.as_json else WatchScreen(Console()))
        watcher = Watcher(observer, cast(Any, members), {}, options, csv, shown)
        try:
            return await watcher.run(Waiting())
        finally:
            watcher.close()

    return run_virtual(story())


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


THREE = [record("a", 0), record("b", 0), record("l", 0)]


def test_a_liar_and_a_mute_member_change_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answers = {"a": honest, "b": honest, "l": lying, "t": evaluating}
    everybody = [*THREE, record("gone", 0), record("t", None)]
    options = WatchOptions(csv=tmp_path / "run.csv", as_json=True)
    assert watch(Members(answers, everybody), options, CsvFile(tmp_path / "run.csv")) == 0
    events = said(capsys)
    assert [(e["step"], e["loss"]) for e in events if e["event"] == "step"] == [(s, 1 - s / 8) for s in range(6)]
    assert [(e["version"], e["loss"]) for e in events if e["event"] == "held_out"] == [(3, 0.5), (6, 0.5)]
    assert events[-1] == {"event": "ended", "text": "the run has finished: 6 steps"}
    assert [(each.step, each.held_out) for each in CsvFile(tmp_path / "run.csv").points if each.held_out] == [
        (2, 0.5),
        (5, 0.5),
    ]


def test_two_that_disagree_are_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    looks = [THREE[::2]] * 3 + [[]]
    assert watch(Members({"a": honest, "l": lying}, *looks), WatchOptions(as_json=True)) == 1
    events = said(capsys)
    assert not [each for each in events if each["event"] == "step"]
    assert [each["text"] for each in events if each["event"] == "note"] == [
        "members say different things of step 0, and none can be believed: it is left out"
    ]


def test_members_that_are_hidden_busy_or_older_are_done_without(capsys: pytest.CaptureFixture[str]) -> None:
    circuit = ("/ip4/203.0.113.7/tcp/1/p2p/r/p2p-circuit/p2p/h",)
    answers: dict[str, Answering] = {
        "a": honest,
        "b": honest,
        "l": lambda _: Busy(1.0, -1),
        "o": lambda _: Rejected(RejectCode.MALFORMED, "\x1b[31mnot a request"),
        "h": lying,
    }
    members = Members(answers, [*THREE, record("o", 1), record("h", 0, addresses=circuit)])
    assert watch(members, WatchOptions(as_json=True, once=True)) == 0
    assert next(e["loss"] for e in said(capsys) if e["event"] == "step") == 1.0
    assert "h" not in {peer for peer, _ in members.asked}


def test_who_keeps_the_others_busy_is_not_believed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    busy: Answering = lambda _: Busy(1.0, -1)  # noqa: E731
    members = Members({"a": busy, "b": busy, "l": lying}, THREE)
    watch(members, WatchOptions(as_json=True, once=True))
    assert not [each for each in said(capsys) if each["event"] == "step"]


def test_what_strangers_say_is_text_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = record("a", 0, software="\x1b]0;owned\x07", numerics="cpu\x1b[2J", finished=False)
    assert watch(Members({"a": honest}, [hostile]), WatchOptions(once=True)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "step 6/6  loss 0.3750" in out


def test_in_a_run_by_invitation_the_uninvited_are_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    owner = Identity.generate()
    manifest = Manifest(admission=Admission(policy="invite", key=owner.peer))
    uninvited = [replace(each, run=run_id(manifest)) for each in THREE]
    members = Members({"a": lying, "b": lying, "l": lying}, uninvited, toml=to_toml(manifest))
    watch(members, WatchOptions(as_json=True, once=True), run=run_id(manifest))
    assert not members.asked and not [each for each in said(capsys) if each["event"] == "step"]


def test_a_manifest_that_is_not_the_runs_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    members = Members({"a": honest}, THREE[:1], toml=to_toml(Manifest()))
    assert watch(members, WatchOptions(as_json=True, once=True)) == 0
    assert len([each for each in said(capsys) if each["event"] == "step"]) == 6


def test_the_run_has_the_name_that_its_manifest_gives_it() -> None:
    names: list[str] = []

    class Names(WatchView):
        def look(self, seen: WatchedRun) -> None:
            names.append(seen.name)

    manifest = Manifest(name="night run")
    records = [replace(each, run=run_id(manifest)) for each in THREE[:1]]
    members = Members({"a": honest}, records, toml=to_toml(manifest))
    watch(members, WatchOptions(once=True), run=run_id(manifest), view=Names())
    assert names == ["night run"]


def test_who_comes_and_goes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    short = [replace(each, steps=9) for each in THREE]
    looks = ([short[0], short[1]], short, short[:2], [replace(each, steps=6) for each in short[:2]])
    assert watch(Members({"a": honest, "b": honest, "l": honest}, *looks), WatchOptions(as_json=True)) == 0
    changes = [(e["event"], e.get("peer")) for e in said(capsys) if e["event"] in ("joined", "left", "gone")]
    assert changes == [("joined", "l"), ("gone", "l")]


def test_a_run_that_nobody_announces_any_more_ends_the_watch(capsys: pytest.CaptureFixture[str]) -> None:
    looks = ([replace(each, steps=9) for each in THREE], [])
    members = Members({"a": honest}, *looks)
    assert watch(members, WatchOptions(as_json=True, every_s=GONE_S / 3)) == 1
    assert "no peer announces run" in said(capsys)[-1]["text"]


def test_who_looks_on_for_a_page_stays_after_the_end_and_sees_all_go(capsys: pytest.CaptureFixture[str]) -> None:
    class Enough(Exception):
        pass

    class Until(Members):
        async def records(self) -> tuple[Record, ...]:
            if asyncio.get_running_loop().time() > began + 3 * GONE_S:
                raise Enough
            return await super().records()

    began = 0.0
    with pytest.raises(Enough):
        watch(Until({"a": honest}, THREE[:1], THREE[:1], []), WatchOptions(as_json=True, page=True, every_s=5.0))
    events = [each for each in said(capsys) if each["event"] != "step"]
    assert [each["event"] for each in events if each["event"] in ("gone", "ended")] == ["gone"]


class Looks(JsonLines):
    """Remembers how members have spent a step."""

    def __init__(self) -> None:
        super().__init__()
        self.bars: list[dict[str, Any]] = []

    def look(self, seen: WatchedRun) -> None:
        self.bars += seen.waterfall["bars"] if seen.waterfall else []


def test_members_of_each_stage_are_asked_how_they_spent_a_step_only_if_the_view_shows_it() -> None:
    looks = Looks()
    spent = lambda stage: lambda request: History(times=(StepTimes(stage, 5, 1.0, 2.0),))  # noqa: E731
    answers: dict[str, Answering] = {"a": spent(0), "b": spent(0), "c": spent(1)}
    without: dict[str, Answer] = {
        "busy": Busy(1.0, -1),
        "earlier version": History(),
        "lost": History(times=(StepTimes(1, 5, 1e12, 2.0),)),
    }
    answers |= {name: lambda request, answer=answer: answer for name, answer in without.items()}  # type: ignore[misc]
    members = Members(answers, [record(name, int(name not in "ab")) for name in (*answers, "mute")])
    members.num_stages = 2
    assert watch(members, WatchOptions(once=True, page=True), view=looks) == 0
    assert sorted((bar["peer"], bar["stage"]) for bar in looks.bars) == [("a", 0), ("b", 0), ("c", 1)]
    assert len(members.asked) == 6, "each once: who is asked of steps says its times, too"
    watch(members, WatchOptions(once=True), view=looks)
    assert len(members.asked) == 6 + 6


def test_members_that_are_not_asked_about_steps_are_asked_for_their_times_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor_run, "MOST_ASKED", 1)
    monkeypatch.setattr(monitor_run, "MOST_TIMED", 3)
    looks = Looks()
    answers: dict[str, Answering] = {
        name: lambda request, stage=stage: History(times=(StepTimes(stage, 5, 1.0, 2.0),))  # type: ignore[misc]
        for name, stage in (("a", 0), ("b", 0), ("c", 0), ("last", 1))
    }
    members = Members(answers, [record(name, int(name == "last")) for name in answers])
    members.num_stages = 2
    assert watch(members, WatchOptions(once=True, page=True), view=looks) == 0
    assert len(looks.bars) == 3 and [since for peer, since in members.asked if peer == "last"] == [0]
    assert [since for peer, since in members.asked if peer != "last"] == [monitor_run._NO_STEP] * 2


def test_a_file_of_another_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path, board = tmp_path / "run.csv", tmp_path / "tb"
    options = WatchOptions(csv=path, as_json=True, once=True)
    watch(Members({"a": honest}, THREE[:1]), options, CsvFile(path))
    before = path.read_bytes()
    options = replace(options, tensorboard=board, png=tmp_path / "run.png")
    with pytest.raises(UsageError, match=r"run.csv: the file is of another run"):
        watch(Members({"a": honest}, THREE[:1]), options, CsvFile(path), run=RunId("cd" * 32))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_ahead_because_the_run_went_back_is_gone_on_with_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.csv"
    options = WatchOptions(csv=path, as_json=True, once=True)
    watch(Members({"a": honest}, THREE[:1]), options, CsvFile(path))
    said(capsys)
    looks = [record("a", 0, 4, restart=Restart(1, 4))]
    watch(Members({"a": lambda request: honest(request, 4)}, looks), options, CsvFile(path))
    events = said(capsys)
    assert [e["version"] for e in events if e["event"] == "went_back"] == [4]
    state = next(e for e in events if e["event"] == "state")
    assert (state["step"], state["version"]) == (3, 4)
    watch(Members({"a": honest}, [record("a", 0, restart=Restart(1, 4))]), options, CsvFile(path))
    events = said(capsys)
    assert not [e for e in events if e["event"] == "went_back"], "the file is not ahead any more"
    assert next((e["step"], e["version"]) for e in events if e["event"] == "state") == (5, 6)


def test_a_watch_that_finds_nobody_leaves_nothing_behind(tmp_path: Path) -> None:
    options = WatchOptions(tmp_path / "made" / "run.csv", tmp_path / "run.png", tmp_path / "tb", once=True)
    assert options.csv and watch(Members({}, []), options, CsvFile(options.csv)) == 1
    assert not list(tmp_path.iterdir())


def changes(*looks: list[Record]) -> list[list[Change]]:
    """Of each look."""
    seen, found = WatchedRun(Curve(), now=0.0), []
    for records in looks:
        seen.look(assess(RUN, records, 1), now=0.0)
        found.append(list(seen.changes))
    return found


def test_who_is_started_again_between_two_looks_is_said_once() -> None:
    trainer = record("t", None)
    looks = [[record("a", 0, incarnation=number), trainer] for number in (1, 1, 2, 2)]
    assert [[each.text for each in some] for some in changes(*looks)] == [
        [],
        [],
        ["...a was started again, stage 0"],
        [],
    ]


def test_going_back_and_problems_are_said_once() -> None:
    first, back = [record("a", 0)], [record("a", 0, restart=Restart(1, 3))]
    of_first, again, of_back = changes(first, first, back)
    assert [each.kind for each in of_first] == ["problem"], "no trainer"
    assert not again and [each.text for each in of_back] == ["the run was restarted from version 3"]


def test_a_kill_and_a_farewell_have_words_of_their_own() -> None:
    a, b, c = (record(name, 0) for name in "abc")
    gone = replace(b, stages=tuple(replace(each, draining=True, synced=False) for each in b.stages))
    texts = [each.text for each in changes([a, b, c], [a, gone])[1] if each.kind != "problem"]
    assert texts == ["...b left stage 0", "...c is gone without a word, stage 0"]


def test_who_is_shut_out_is_no_farewell_either() -> None:
    out = Complaint(0, PeerId("c"), "convicted", "step 3: false", 9)
    all_three = [record(name, 0) for name in "abc"]
    after = [*(replace(each, complaints=(out,)) for each in all_three[:2]), all_three[2]]
    assert ("gone", "...c was shut out, stage 0") in [(each.kind, each.text) for each in changes(all_three, after)[1]]


def test_a_convict_and_disputes_are_lines_and_nobody_asks_the_convict(capsys: pytest.CaptureFixture[str]) -> None:
    out = Complaint(0, PeerId("l"), "convicted", "step 3: false", 9)
    before = [record(name, 0, steps=9) for name in "abl"]
    after = [*(replace(each, complaints=(out,)) for each in before[:2]), before[2]]
    last = (DisputedWork(0, 4, PeerId("b")), DisputedWork(0, 4, PeerId("b")), DisputedWork(0, 5, PeerId("a")))
    disputes = [
        [replace(each, disputed=of, num_disputed=number) for each in after[:2]] for number, of in enumerate(last, 1)
    ]
    over = [replace(each, steps=6) for each in disputes[-1]]
    members = Members({"a": honest, "b": honest, "l": honest}, before, after, *disputes, over)
    watch(members, WatchOptions(as_json=True))
    events = said(capsys)
    lines = [
        each["text"] for each in events if each["event"] == "problem" and each["kind"] in ("convicted", "disputed")
    ]
    assert [line.split(" (")[0].split(";")[0] for line in lines] == [
        "banned: l of stage 0",
        "in 1 case of stage 0 a peer is at fault and none can be named, as 2 of 2 replicas say",
        "in 3 cases of stage 0 a peer is at fault and none can be named, as 2 of 2 replicas say",
    ]
    assert [each["peer"] for each in events if each["event"] == "gone"] == ["l"]
    assert [each["num_disputed"] for each in events if each["event"] == "state"][-1] == 3
    assert sum(peer == "l" for peer, _ in members.asked) == 1, "in the first look alone"
