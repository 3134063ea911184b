"""One liar beside three honest members, as `benchmarks/strangers.py` has it, which prints what each lie costs."""

from __future__ import annotations

import statistics
import sys

import pytest

from swarmnet.ids import PeerId, RunId
from tests.benchmark_modules import load

strangers = load("strangers")

SHORT_S, SHORT_LEAST = 16.0, 0.5
"""So much lying shows whether a liar can stop a run or change it; what a lie costs in the end takes five minutes."""

pytestmark = pytest.mark.timeout(900)  # minutes of virtual time are as many on a slow machine

QUIET_S = 5.0
"""After so long a liar is a member."""

SLOWER = dict.fromkeys(
    (
        *("forged-sum", "false-ack", "usurps", "claims-everything", "slow-parts", "bad-parts", "never-sums"),
        *("fresh-every-ten-seconds", "fresh-key-every-4-s", "fresh-key-after-first-contribution", "mute-keys-stay"),
    ),
    (30.0, 10.0),
) | {"moves-on": (60.0, 10.0), "acks-a-little-late": (40.0, 10.0), "reports-late": (50.0, 20.0)}
"""Seconds of lying, and before it, where less would show less: a liar joins in its own time, keeps when it is its turn,
or is borne with for long."""

FOUND_S = 60.0
"""Auditors draw some of a liar's works in so long, and agree on them."""

LONG_S = 60.0
"""So many show that two steps at most are held up by a leader."""

WITHSTOOD = (
    "forged-sum",
    "forged-sum-kept",
    "forged-commit",
    "forged-commit-beside",
    "false-ack",
    "acks-two-ways",
    "acks-a-little-late",
    "usurps",
    "ghost-ballot",
    "claims-everything",
    "releases",
    "slow-parts",
    "bad-parts",
    "never-sums",
    "forks",
    "discards-everything",
    "fifty-ahead",
    "never-reports",
    "reports-late",
    "new-accumulators",
    "new-lives",
    "moves-on",
    "says-discard",
    "says-stale",
    "hoards-slots",
    "fresh-every-ten-seconds",
    "fresh-key-every-4-s",
    "fresh-key-after-first-contribution",
    "mute-keys-stay",
    "feeds-stage",
    "feeds-tokens",
    "lying-reducer",
)
"""Lies that neither stop the run nor change it within so short a time. What each costs in the end, and which cost more,
the benchmark prints."""

RUNS = tuple(RunId(digit * 64) for digit in "0123")
"""The run decides who leads when, and with that what a lying leader costs: a liar leads for a third of a short run, and
for much more or less of it in one of them."""

ALIKE = ("forged-sum-kept", "forged-commit-beside", "acks-two-ways", "says-stale")
"""Each told the way of another of them."""


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.long] * (each in ALIKE)) for each in WITHSTOOD])
def test_some_seconds_of_lying(name: str) -> None:
    seconds, quiet = SLOWER.get(name, (SHORT_S, QUIET_S))
    row = strangers.measure(name, seconds=seconds, quiet=quiet)
    assert not row.broken and row.weights_equal, row
    assert row.ratio >= SHORT_LEAST, f"{row.steps} steps instead of {row.undisturbed}, {row.longest_s} s without one"
    assert row.named, f"no event names the liar: {row.lie}"


@pytest.mark.parametrize("name", ["wrong-gradient", "wrong-activations"])
def test_who_lies_about_its_work_is_found_and_shut_out_for_good(name: str) -> None:
    rows = [strangers.measure(name, seconds=FOUND_S, quiet=QUIET_S, seed=seed) for seed in (1, 2)]
    for row in rows:
        assert row.named_in["convicted"] and not row.wronged and not row.broken, row
        # What it brought before is applied: each step after that is what one process makes of it.
        assert 0 < row.tainted < row.steps and row.weights_equal and row.ratio >= SHORT_LEAST, row


def test_no_known_lie_is_open() -> None:
    assert not strangers.OPEN and "wrong-gradient" in strangers.LIES


@pytest.mark.parametrize("name", ["keeps-idle", "keeps-and-evicts"])
def test_a_leader_under_whom_nothing_comes_is_left_and_named(name: str) -> None:
    row = strangers.measure(name, seconds=LONG_S)
    assert row.weights_equal and row.named and row.ratio >= SHORT_LEAST, row
    assert row.longest_s <= 30.0, "two steps, each for as long as a leader is given"


def test_who_never_keeps_in_its_turn_is_passed_over_by_all() -> None:
    row = strangers.measure("never-keeps", seconds=LONG_S)
    assert row.weights_equal and row.named and row.ratio >= 0.85, row


@pytest.mark.parametrize("name", [pytest.param("leaves-out", marks=pytest.mark.long), "leader-discards-all"])
def test_a_leader_whose_round_is_refused_is_left_at_once(name: str) -> None:
    row = strangers.measure(name, seconds=LONG_S)
    assert row.weights_equal and row.ratio >= 0.9 and row.named_in["refused_message"], row
    assert row.longest_s <= 5.0, "it is not followed for the length of its term"


@pytest.mark.long
def test_two_honest_members_leave_an_idle_leader_too() -> None:
    row = strangers.measure("keeps-idle", honest=2, seconds=LONG_S)
    assert row.weights_equal and row.named and row.ratio >= SHORT_LEAST and row.longest_s <= 30.0, row


def test_a_leader_for_a_ghost_costs_two_honest_members_little() -> None:
    rows = [strangers.measure("keeps-for-a-ghost", honest=2, seconds=LONG_S, run=run) for run in RUNS]
    assert all(row.weights_equal and row.longest_s <= 5.0 for row in rows), rows
    # It leads a third of the steps, and each of these takes twice as long at most.
    assert statistics.fmean(row.ratio for row in rows) >= 0.85, rows


@pytest.mark.parametrize("name", ["never-exchanges", pytest.param("releases", marks=pytest.mark.long)])
def test_two_that_collude_against_three(name: str) -> None:
    # Of eight runs, "0" to "7", two colluders hold a step for 52 s in "3", which is open.
    rows = [strangers.measure(name, liars=2, seconds=LONG_S, run=RunId(digit * 64)) for digit in "456"]
    for row in rows:
        assert not row.broken and row.weights_equal and row.named_in and row.ratio >= SHORT_LEAST, row
        assert row.longest_s <= 20.0, "what two honest members and two liars have signed, somebody honest has"
    # Who leads when it lies may leave itself out, and is not waited for any more.
    assert sum(row.named for row in rows) >= 2, rows


def test_a_leader_that_names_correct_peers_late_again_and_again_is_excluded_itself() -> None:
    """Each correct peer was excluded again whenever the liar led, and the liar was named in no event."""
    row = strangers.measure("names-correct-peers-again", seconds=LONG_S)
    assert row.weights_equal and row.ratio >= 0.9 and row.named_in["late"] and row.named_in["excluded"], row


@pytest.mark.parametrize("seed", [1, 2])
def test_s2_a_callee_that_answers_running_for_ever_makes_no_caller_late(seed: int) -> None:
    trial, liar = strangers.Trial(3, 2 * SHORT_S, seed, strangers.STAGE, QUIET_S), PeerId("liar.0")
    trial.run([strangers.LIES["accepts-never-finishes"](trial.swarm, liar)])
    assert not trial.broken and trial.weights_equal and trial.steps >= SHORT_S
    late = {fields["peer"] for _, _, event, fields in trial.swarm.events if event in ("late", "excluded")}
    assert late <= {liar}, "its callers do their part"


def test_an_honest_member_in_the_liars_place_is_named_in_no_event() -> None:
    row = strangers.measure("", seconds=SHORT_S, quiet=QUIET_S)
    assert row.named_in == {} and row.steps >= row.undisturbed and row.weights_equal


@pytest.mark.parametrize("words", [["--rows", "nonsense"], ["--parts", "all"], ["--liars", "3"], ["--seconds", "0"]])
def test_the_benchmark_refuses_what_it_does_not_know_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["strangers.py", *words])
    with pytest.raises(SystemExit) as ended:
        strangers.main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
