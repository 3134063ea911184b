"""A watch over members that lie, are mute or have left: what it shows, and how it ends. On virtual time, no network."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swarmnet.cli.frame import run as run_command
from swarmnet.config import check
from swarmnet.directory import Complaint, DisputedWork, Record, StageStatus
from swarmnet.errors import PeerGone, RejectCode, UsageError
from swarmnet.ids import Chain, PeerId, Restart, RunId
from swarmnet.manifest.file import run_id, to_toml
from swarmnet.manifest.schema import Admission, Manifest
from swarmnet.messages import Busy, History, HistoryRequest, ManifestData, ManifestRequest, Rejected
from swarmnet.monitor import run as monitor
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.files import CsvFile
from swarmnet.monitor.run import GONE_S, Watcher, WatchOptions
from swarmnet.monitor.state import WatchedRun
from swarmnet.monitor.view import JsonLines, WatchScreen, folded
from swarmnet.net.identity import Identity
from swarmnet.peer.status import Observer, Waiting
from swarmnet.peer.swarm_health import assess
from swarmnet.telemetry.figures import MAX_FIGURES, Evaluation, StepFigures
from swarmnet.telemetry.spans import StepTimes
from swarmnet.testing.doubles import FakeTransport, Script, run_virtual

RUN = RunId("ab" * 32)
BUSY = Busy(1.0, -1)


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


def spent(stage: int, version: int = 5, began: float = 1.0) -> History:
    return History(times=(StepTimes(stage, version, began, 2.0),))


class Members(FakeTransport):
    """A transport to members that answer as told, and the directory that they are in. looks: its records, in turn."""

    def __init__(
        self, answers: dict[str, Script | Callable], *looks: list[Record], toml: str = "", num_stages: int = 1
    ) -> None:
        """toml: the manifest, which all who answer give."""
        super().__init__(self._says)
        self._answers, self._looks, self._toml, self.num_stages = answers, list(looks), toml, num_stages
        self._admits = lambda peer: True

    def _says(self, peer: PeerId, request: Any) -> Script:
        if peer not in self._answers or (isinstance(request, ManifestRequest) and not self._toml):
            return PeerGone("nobody listens", peer=peer)
        says = ManifestData(self._toml) if isinstance(request, ManifestRequest) else self._answers[peer]
        return says(request) if callable(says) else says

    @property
    def asked_since(self) -> list[tuple[PeerId, int]]:
        """Members that were asked for steps, and since which one."""
        return [(peer, request.since) for peer, request in self.requests if isinstance(request, HistoryRequest)]

    async def records(self) -> tuple[Record, ...]:
        found = self.known()
        self._looks = self._looks[1:] or self._looks
        return found

    def known(self) -> tuple[Record, ...]:
        return tuple(each for each in self._looks[0] if self._admits(each.peer))

    def learn(self, num_stages: int, admissions: Any) -> None:
        self._admits = lambda peer: admissions.admitted(peer, "stage", now=0.0)


Event = dict[str, Any]
Watch = Callable[..., tuple[int, list[Event]]]


@pytest.fixture
def watch(capsys: pytest.CaptureFixture[str]) -> Watch:
    """Watch members. Returns the exit code and the events that are told, if the view is to tell them."""

    def look_on(members: Members, *, run: RunId = RUN, view: Any = None, **options: Any) -> tuple[int, list[Event]]:
        async def story() -> int:
            observer = Observer(run, members, None, asyncio.get_running_loop().time() + 10)
            csv = CsvFile(options["csv"]) if "csv" in options else None
            watcher = Watcher(observer, members, {}, WatchOptions(**options), csv, view or JsonLines())
            try:
                return await watcher.run(Waiting())
            finally:
                watcher.close()

        code = run_virtual(story())
        return code, [] if view else events_in(capsys)

    return look_on


def events_in(capsys: pytest.CaptureFixture[str]) -> list[Event]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def of(events: list[Event], name: str, *fields: str) -> list[Any]:
    """These fields of the events of that name."""
    found = [tuple(each.get(field) for field in fields) for each in events if each["event"] == name]
    return [each[0] for each in found] if len(fields) == 1 else found


THREE = [record("a", 0), record("b", 0), record("l", 0)]


def steps(count: int, records: list[Record] = THREE) -> list[Record]:
    """The run has so many."""
    return [replace(each, steps=count) for each in records]


def test_a_liar_and_a_mute_member_change_nothing(watch: Watch, tmp_path: Path) -> None:
    answers = {"a": honest, "b": honest, "l": lying, "t": evaluating}
    csv = tmp_path / "run.csv"
    code, events = watch(Members(answers, [*THREE, record("gone", 0), record("t", None)]), csv=csv)
    assert code == 0 and of(events, "step", "step", "loss") == [(s, 1 - s / 8) for s in range(6)]
    assert of(events, "held_out", "version", "loss") == [(3, 0.5), (6, 0.5)]
    assert events[-1] == {"event": "ended", "text": "the run has finished: 6 steps"}
    assert [(each.step, each.held_out) for each in CsvFile(csv).points if each.held_out] == [(2, 0.5), (5, 0.5)]


def test_two_that_disagree_are_told_of_once(watch: Watch) -> None:
    code, events = watch(Members({"a": honest, "l": lying}, *[THREE[::2]] * 3, []))
    assert code == 1 and not of(events, "step")
    assert of(events, "note", "text") == [
        "members say different things of step 0, and none can be believed: it is left out"
    ]


def test_members_that_are_hidden_busy_or_older_are_done_without(watch: Watch) -> None:
    circuit = ("/ip4/203.0.113.7/tcp/1/p2p/r/p2p-circuit/p2p/h",)
    older = Rejected(RejectCode.MALFORMED, "\x1b[31mnot a request")
    answers = {"a": honest, "b": honest, "l": BUSY, "o": older, "h": lying}
    members = Members(answers, [*THREE, record("o", 1), record("h", 0, addresses=circuit)])
    code, events = watch(members, once=True)
    assert code == 0 and of(events, "step", "loss")[0] == 1.0
    assert "h" not in {peer for peer, _ in members.asked_since}


@pytest.mark.parametrize("busy", [1, 2])
def test_who_keeps_the_others_busy_is_not_believed_alone(watch: Watch, busy: int) -> None:
    _, events = watch(Members({"l": lying} | dict.fromkeys("ab"[2 - busy :], BUSY), THREE[2 - busy :]), once=True)
    assert not of(events, "step")


def test_what_strangers_say_is_text_on_a_terminal(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = record("a", 0, software="\x1b]0;owned\x07", numerics="cpu\x1b[2J", finished=False)
    assert watch(Members({"a": honest}, [hostile]), view=WatchScreen(Console()), once=True)[0] == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "step 6/6  loss 0.3750" in out


def test_in_a_run_by_invitation_the_uninvited_are_not_asked(watch: Watch) -> None:
    manifest = Manifest(admission=Admission(policy="invite", key=Identity.generate().peer))
    uninvited = [replace(each, run=run_id(manifest)) for each in THREE]
    members = Members(dict.fromkeys("abl", lying), uninvited, toml=to_toml(manifest))
    _, events = watch(members, once=True, run=run_id(manifest))
    assert not members.asked_since and not of(events, "step")


def test_a_manifest_that_is_not_the_runs_changes_nothing(watch: Watch) -> None:
    code, events = watch(Members({"a": honest}, THREE[:1], toml=to_toml(Manifest())), once=True)
    assert code == 0 and len(of(events, "step")) == 6


def test_a_run_that_nobody_announces_any_more_ends_the_watch(watch: Watch) -> None:
    code, events = watch(Members({"a": honest}, steps(9), []), every_s=GONE_S / 3)
    assert code == 1 and "no peer announces run" in events[-1]["text"]


def test_who_looks_on_for_a_page_stays_after_the_end_and_sees_all_go(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Until(Members):
        async def records(self) -> tuple[Record, ...]:
            if asyncio.get_running_loop().time() > 3 * GONE_S:
                raise InterruptedError
            return await super().records()

    with pytest.raises(InterruptedError):
        watch(Until({"a": honest}, THREE[:1], THREE[:1], []), page=True, every_s=5.0)
    assert [each["event"] for each in events_in(capsys) if each["event"] in ("gone", "ended")] == ["gone"]


class Looks(JsonLines):
    """Remembers the run's name, and how members have spent a step."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.bars = list[str](), list[dict[str, Any]]()

    def look(self, seen: WatchedRun) -> None:
        self.names.append(seen.name)
        self.bars += seen.waterfall["bars"] if seen.waterfall else []


def test_the_run_has_the_name_that_its_manifest_gives_it(watch: Watch) -> None:
    manifest, looks = Manifest(name="night run"), Looks()
    records = [replace(each, run=run_id(manifest)) for each in THREE[:1]]
    watch(Members({"a": honest}, records, toml=to_toml(manifest)), once=True, run=run_id(manifest), view=looks)
    assert looks.names == ["night run"]


def test_members_of_each_stage_are_asked_how_they_spent_a_step_only_if_the_view_shows_it(watch: Watch) -> None:
    looks = Looks()
    answers = {"a": spent(0), "b": spent(0), "c": spent(1)}
    answers |= {"busy": BUSY, "earlier version": History(), "lost": spent(1, began=1e12)}
    members = Members(answers, [record(name, int(name not in "ab")) for name in (*answers, "mute")], num_stages=2)
    assert watch(members, once=True, page=True, view=looks)[0] == 0
    assert sorted((bar["peer"], bar["stage"]) for bar in looks.bars) == [("a", 0), ("b", 0), ("c", 1)]
    answered = lambda: sum(peer in answers for peer, _ in members.asked_since)  # noqa: E731
    assert answered() == 6, "each once: who is asked of steps says its times, too"
    watch(members, once=True, view=looks)
    assert answered() == 6 + 6


def test_members_that_are_not_asked_about_steps_are_asked_for_their_times_alone(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "MOST_ASKED", 1)
    monkeypatch.setattr(monitor, "MOST_TIMED", 3)
    looks, answers = Looks(), {**dict.fromkeys("abc", spent(0)), "last": spent(1)}
    members = Members(answers, [record(name, int(name == "last")) for name in answers], num_stages=2)
    assert watch(members, once=True, page=True, view=looks)[0] == 0
    assert len(looks.bars) == 3 and [since for peer, since in members.asked_since if peer == "last"] == [0]
    assert [since for peer, since in members.asked_since if peer != "last"] == [monitor._NO_STEP] * 2


def test_a_file_of_another_run_is_refused_before_anything_is_written(watch: Watch, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    watch(Members({"a": honest}, THREE[:1]), csv=path, once=True)
    before, others = path.read_bytes(), {"tensorboard": tmp_path / "tb", "png": tmp_path / "run.png"}
    with pytest.raises(UsageError, match=r"run.csv: the file is of another run"):
        watch(Members({"a": honest}, THREE[:1]), csv=path, once=True, run=RunId("cd" * 32), **others)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_ahead_because_the_run_went_back_is_gone_on_with_and_that_is_said(
    watch: Watch, tmp_path: Path
) -> None:
    back = Restart(1, 4)
    for answer, seen, went_back, state in (
        (honest, record("a", 0), [], (5, 6)),
        (lambda request: honest(request, 4), record("a", 0, 4, restart=back), [4], (3, 4)),
        # The file is not ahead any more.
        (honest, record("a", 0, restart=back), [], (5, 6)),
    ):
        _, events = watch(Members({"a": answer}, [seen]), csv=tmp_path / "run.csv", once=True)
        assert of(events, "went_back", "version") == went_back
        assert of(events, "state", "step", "version")[0] == state


def test_a_watch_that_finds_nobody_leaves_nothing_behind(watch: Watch, tmp_path: Path) -> None:
    files = {"csv": tmp_path / "made" / "run.csv", "png": tmp_path / "run.png", "tensorboard": tmp_path / "tb"}
    assert watch(Members({}, []), once=True, **files)[0] == 1 and not list(tmp_path.iterdir())


def convicting(records: list[Record], liar: str) -> list[Record]:
    """All but it say that it is banned."""
    out = Complaint(0, PeerId(liar), "convicted", "step 3: false", 9)
    return [each if each.peer == liar else replace(each, complaints=(out,)) for each in records]


A, B, C, TRAINER = (record(name, 0 if name != "t" else None) for name in "abct")
GONE = replace(B, stages=tuple(replace(each, draining=True, synced=False) for each in B.stages))


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        (
            [[replace(A, incarnation=number), TRAINER] for number in (1, 1, 2, 2)],
            [[], [], ["...a was started again, stage 0"], []],
        ),
        (
            [[A, TRAINER], [A, TRAINER], [replace(A, restart=Restart(1, 3)), TRAINER]],
            [[], [], ["the run was restarted from version 3"]],
        ),
        ([[A, B, C], [A, GONE]], [[], ["...b left stage 0", "...c is gone without a word, stage 0"]]),
        ([[A, B, C], convicting([A, B, C], "c")], [[], ["...c was shut out, stage 0"]]),
    ],
    ids=["started again", "went back", "a farewell and a kill", "shut out"],
)
def test_a_change_between_two_looks_is_said_once_in_words_of_its_own(looks: list, said: list[list[str]]) -> None:
    seen, found = WatchedRun(Curve(), now=0.0), []
    for records in looks:
        seen.look(assess(RUN, records, 1), now=0.0)
        found.append([each.text for each in seen.changes if each.kind != "problem"])
    assert found == said


def test_a_problem_is_said_once() -> None:
    seen, kinds = WatchedRun(Curve(), now=0.0), []
    for _ in range(2):
        seen.look(assess(RUN, [A], 1), now=0.0)
        kinds.append([each.kind for each in seen.changes])
    assert kinds == [["problem"], []], "no trainer"


def test_a_convict_and_disputes_are_lines_and_nobody_asks_the_convict(watch: Watch) -> None:
    before = steps(9, [record(name, 0) for name in "abl"])
    after = convicting(before, "l")
    last = (DisputedWork(0, 4, PeerId("b")), DisputedWork(0, 4, PeerId("b")), DisputedWork(0, 5, PeerId("a")))
    disputes = [
        [replace(each, disputed=of, num_disputed=number) for each in after[:2]] for number, of in enumerate(last, 1)
    ]
    members = Members(dict.fromkeys("abl", honest), before, after, *disputes, steps(6, disputes[-1]))
    _, events = watch(members)
    problems = of(events, "problem", "kind", "text")
    assert [text.split(" (")[0].split(";")[0] for kind, text in problems if kind in ("convicted", "disputed")] == [
        "banned: l of stage 0",
        "in 1 case of stage 0 a peer is at fault and none can be named, as 2 of 2 replicas say",
        "in 3 cases of stage 0 a peer is at fault and none can be named, as 2 of 2 replicas say",
    ]
    assert of(events, "gone", "peer") == ["l"] and of(events, "state", "num_disputed")[-1] == 3
    assert sum(peer == "l" for peer, _ in members.asked_since) == 1, "in the first look alone"


# ---------------------------------------------------------------- the command

LINK = f"swarm:{'ab' * 32}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"


@pytest.mark.parametrize(("found", "code"), [(True, 0), (False, 130)])
def test_ctrl_c_is_an_interrupt_only_before_the_run_was_found(
    found: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stopped(*arguments: object) -> None:
        if found:
            next(each for each in arguments if isinstance(each, Waiting)).over()
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr(monitor, "look_on", stopped)
    assert run_command(["watch", LINK]) == code
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "extra"), [("--png=x.png", "plot"), ("--tensorboard=x", "tensorboard"), ("--wandb=x", "wandb")]
)
def test_an_extra_that_is_missing_is_named_before_anything_is_asked(
    option: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    assert run_command(["watch", LINK, option]) == 2
    assert f"pip install 'swarmnet-train[{extra}]'" in capsys.readouterr().err


def test_a_narrow_terminal_breaks_a_line_between_its_figures() -> None:
    line = "ab12  step 5/60  loss 3.1000  1,200 tokens/s  replicas 2/2 2/2  ETA 0:30"
    assert folded(line, 200) == [line]
    rows = folded(line, 30)
    assert max(map(len, rows)) <= 30 and "  ".join(rows) == line and "replicas 2/2 2/2  ETA 0:30" in rows
