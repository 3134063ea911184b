"""Notices that extend a run: what is signed, which of them take force, and the schedule that follows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_table import Table

from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.manifest.extension import MAX_NOTICES, Extension, Horizon, Notice, Notices
from swarmnet.manifest.schema import Optimizer
from swarmnet.messages import StateHeader
from swarmnet.net.identity import Identity, verify
from swarmnet.net.records import Announcement
from swarmnet.stage.canonical import learning_rate, rate_of
from swarmnet.wire.fields import Wrong
from swarmnet.wire.signed import from_bytes, from_text, sign, to_bytes, to_text

RUN, OWNER, OTHER = RunId("ab" * 32), Identity.from_seed(b"o" * 32), Identity.from_seed(b"x" * 32)
TOTAL = 100


def notice(number: int, since: int, steps: int, *, by: Identity = OWNER, run: RunId = RUN) -> Notice:
    return sign(Extension(run, number, since, steps), by.peer, by.sign)


def notices(owner: PeerId | None = OWNER.peer) -> Notices:
    return Notices(TOTAL, RUN, owner, verify)


def test_what_is_written_is_read_again() -> None:
    said = notice(3, 50, 200)
    read = from_text(f" {to_text(said)}\n", Extension)
    assert read == said and read.value == said.value == Extension(RUN, 3, 50, 200)
    assert len(to_text(said)) < 300 and from_bytes(to_bytes(said), Announcement, Extension) == said


@given(st.text(max_size=80), st.integers(0, 400))
def test_any_text_is_a_notice_or_no_notice(text: str, at: int) -> None:
    whole = to_text(notice(1, 50, 200))
    for each in (text, whole[:at] + text + whole[at + 1 :], whole[:at]):
        try:
            found = from_text(each, Extension)
        except ValueError:
            continue
        assert from_text(to_text(found), Extension) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"extension:{RUN}:{OWNER.peer}:1:50:200:{'ab' * 64}", "signed for an earlier version, and only that reads it"),
        ("bans:AAAA", "does not begin with extension:"),
        ("extension:AAAA", "a damaged extension: copy all of it"),
        (to_text(notice(1, 50, 200))[:-9], "a damaged extension"),
    ],
)
def test_other_text_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_text(text, Extension)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (notice(1, 50, 200, by=OTHER), "who does not own this run"),
        (replace(notice(1, 50, 200), payload=notice(1, 50, 300).payload), "not signed by the run's owner"),
        (replace(notice(1, 50, 200, by=OTHER), key=OWNER.peer), "not signed by the run's owner"),
        (notice(1, 50, 200, run=RunId("cd" * 32)), "a notice of run cdcdcdcdcdcd, not of abababababab"),
        (notice(1, 50, TOTAL), "a notice of 100 steps, no more than the 100 of the manifest"),
    ],
)
def test_a_bad_notice_is_refused_in_words(said: Notice, reason: str) -> None:
    known = notices()
    (words,) = known.learn_all([said])
    assert reason in words and not known.known and not known.mark


@pytest.mark.parametrize(("number", "since"), [(0, 50), (1, 0)])
def test_a_notice_has_a_number_and_begins_after_the_start(number: int, since: int) -> None:
    with pytest.raises(Wrong, match=r"is 0, not in 1\.\."):
        notice(number, since, 200)


def test_a_run_without_an_owner_is_never_extended() -> None:
    (words,) = notices(None).learn_all([notice(1, 50, 200)])
    assert "names no owner" in words


def test_a_run_has_so_many_notices_and_no_more() -> None:
    known = notices()
    assert not known.learn_all(notice(n + 1, 50, 200 + n) for n in range(MAX_NOTICES))
    assert known.learn_all([notice(MAX_NOTICES + 1, 50, 900)]) == ["more than 64 notices of one run"]
    assert not known.learn_all([notice(1, 50, 200)]), "a known one is no further one"


def test_who_knows_the_same_says_the_same_mark() -> None:
    said = [notice(n, 50, 200 + n) for n in (1, 2, 3)]
    one, other = notices(), notices()
    one.learn_all(said)
    other.learn_all(reversed(said[:2]))
    assert one.mark != other.mark
    other.learn_all(one.known)
    assert one.mark == other.mark and len(one.mark) == 8


def test_it_takes_force_in_its_own_step_alone() -> None:
    horizon, said = Horizon(TOTAL), notice(1, 50, 200)
    assert horizon.after(49, [said]) == horizon.after(51, [said]) == horizon.after(50, []) == horizon
    assert horizon.after(50, [said]).last == 200
    # Sent again, or with fewer steps than the run has, or beyond its end, it changes nothing.
    longer = horizon.after(50, [said])
    assert longer.after(50, [said]) == longer.after(60, [notice(2, 60, 150)]) == longer
    assert horizon.after(101, [notice(1, 101, 200)]) == horizon
    assert longer.after(60, [notice(2, 60, 300)]).last == 300


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(101, 300)), max_size=5), st.randoms())
def test_in_whatever_order_they_are_named_the_same_one_counts(said: list[tuple[int, int]], rng: random.Random) -> None:
    named = [notice(number, 50, steps) for number, steps in said]
    shuffled = rng.sample(named, len(named))
    assert Horizon(TOTAL).after(50, named) == Horizon(TOTAL).after(50, shuffled)


def test_the_end_is_open_once_a_notice_begins_there() -> None:
    known, horizon = notices(), Horizon(TOTAL)
    assert known.last(horizon) == TOTAL
    known.learn(notice(1, 50, 150))
    assert known.last(horizon) == TOTAL and known.due(50, horizon) is not None and known.due(51, horizon) is None
    assert known.foreseen(0, horizon).last == 150 and known.foreseen(51, horizon).last == TOTAL
    known.learn(notice(2, 100, 200))
    assert known.last(horizon) == 200 == known.furthest
    assert known.foreseen(0, horizon).last == 200 and known.foreseen(0, horizon, before=100).last == 150


def test_what_a_checkpoint_remembers_is_checked() -> None:
    first, second = notice(1, 50, 150), notice(2, 150, 400)
    assert notices().horizon([first, second]).last == 400
    assert notices().horizon([]) == Horizon(TOTAL)
    for bad in ([second, first], [first, first], [replace(first, payload=second.payload)]):
        with pytest.raises(ValueError, match="notice"):
            notices().horizon(bad)


def test_a_replica_that_is_restored_has_the_notices_of_its_state_and_no_others() -> None:
    member = Table("A").members["A"]
    first, chain = notice(1, 10, 50), Chain("2" * 64)
    for held, last in (((first,), 50), ((), 10)):
        member.restored(StateHeader(10, chain, chain, chain, notices=held), None, (), now=0.0)
        assert (member.horizon.last, member.horizon.notices) == (last, held)


# ---------------------------------------------------------------- the schedule

tables = st.builds(
    Optimizer,
    learning_rate=st.floats(1e-5, 1.0),
    warmup_steps=st.integers(0, 30),
    schedule=st.sampled_from(["constant", "cosine", "wsd"]),
    decay_steps=st.integers(0, 40),
    min_lr_ratio=st.floats(0.0, 1.0),
)
plans = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), max_size=4)


def horizon_of(plan: list[tuple[int, int]]) -> Horizon:
    """(how long after the one before it begins, how many steps it adds) of each notice."""
    horizon, since = Horizon(TOTAL), 0
    for number, (after, more) in enumerate(plan, 1):
        since = min(since + after, horizon.last)
        horizon = horizon.after(since, [notice(number, since, horizon.last + more)])
    return horizon


@given(tables, plans)
def test_before_a_notice_nothing_is_different(table: Optimizer, plan: list[tuple[int, int]]) -> None:
    horizon = horizon_of(plan)
    for number, extension in enumerate(horizon.notices):
        shorter = Horizon(TOTAL, horizon.notices[:number])
        for step in range(extension.value.since):
            assert rate_of(table, step, shorter) == rate_of(table, step, horizon)
    assert all(
        rate_of(table, step, Horizon(TOTAL)) == learning_rate(table, step, total_steps=TOTAL) for step in range(TOTAL)
    )


@given(tables, plans.filter(bool))
def test_from_a_notice_on_it_is_the_longer_plan_and_climbs_no_faster_than_the_warm_up(
    table: Optimizer, plan: list[tuple[int, int]]
) -> None:
    horizon = horizon_of(plan)
    since, climb = (
        horizon.notices[-1].value.since,
        table.learning_rate / table.warmup_steps if table.warmup_steps else 1e9,
    )
    before = rate_of(table, since - 1, horizon)
    for step in range(since, horizon.last):
        planned = learning_rate(table, step, total_steps=horizon.last)
        rate = rate_of(table, step, horizon)
        assert 0 <= rate <= planned
        assert rate <= before + climb * 1.000001 and (rate == planned or rate > before)
        before = rate


def test_a_decay_that_has_begun_is_taken_back() -> None:
    """WSD, decay over the last 20 steps: at half of it the run is extended, and the rate goes back to the peak."""
    table = Optimizer(learning_rate=1.0, warmup_steps=10, schedule="wsd", decay_steps=20, min_lr_ratio=0.0)
    horizon = Horizon(TOTAL, (notice(1, 90, 200),))
    rates = [rate_of(table, step, horizon) for step in range(200)]
    assert rates[79:83] == [1.0, 1.0, 0.95, 0.9] and rates[89] == pytest.approx(0.55)
    assert rates[90:95] == pytest.approx([0.65, 0.75, 0.85, 0.95, 1.0]) and set(rates[94:181]) == {1.0}
    assert rates[190] == 0.5


def test_a_cosine_that_has_ended_begins_again_where_the_longer_one_would_be() -> None:
    table = Optimizer(learning_rate=1.0, warmup_steps=10, schedule="cosine", min_lr_ratio=0.1)
    horizon = Horizon(TOTAL, (notice(1, 100, 190),))
    assert rate_of(table, 99, horizon) == pytest.approx(0.1, abs=1e-3)
    assert rate_of(table, 100, horizon) == pytest.approx(0.2, abs=1e-3)
    assert rate_of(table, 104, horizon) == learning_rate(table, 104, total_steps=190) == pytest.approx(0.52, abs=0.01)
