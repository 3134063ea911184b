"""A caller's messages beyond its allowance wait, and nobody else's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.ids import PeerId
from swarmnet.net.traffic import _REMEMBERED, Allowance, Allowances

A, B = PeerId("a"), PeerId("b")
EACH = Allowance(messages_per_s=8, bytes_per_s=1000, burst_s=2.0)


def test_a_burst_is_free_and_the_next_message_waits() -> None:
    allowances = Allowances(EACH)
    assert [allowances.take(A, 1, 5.0) for _ in range(16)] == [0.0] * 16
    assert round(allowances.take(A, 1, 5.0), 9) == 0.125
    assert allowances.take(B, 1, 5.0) == 0.0, "another caller has its own"


def test_bytes_count_as_messages_do() -> None:
    allowances = Allowances(EACH)
    assert allowances.take(A, 2000, 0.0) == 0.0
    assert round(allowances.take(A, 500, 0.0), 9) == 0.5


def test_what_was_used_comes_back_with_time_and_no_more() -> None:
    allowances = Allowances(EACH)
    allowances.take(A, 2000, 0.0)
    assert allowances.take(A, 2000, 1e6) == 0.0
    assert allowances.take(A, 2000, 1e6) == 2.0, "an hour of silence is no hour of credit"


def test_what_is_refused_costs_nothing() -> None:
    allowances = Allowances(EACH)
    assert [allowances.ask(A, 5.0) for _ in range(16)] == [0.0] * 16
    assert [round(allowances.ask(A, 5.0), 9) for _ in range(100)] == [0.125] * 100
    assert allowances.ask(A, 5.125) == 0.0 < allowances.ask(A, 5.125)


def test_an_excess_is_said_once_a_caller() -> None:
    allowances = Allowances(EACH)
    for caller in (A, B):
        allowances.take(caller, 1, 0.0)
    assert [allowances.first_excess(caller) for caller in (A, A, B, A)] == [True, False, True, False]


def test_strangers_do_not_fill_memory() -> None:
    allowances = Allowances(EACH)
    for number in range(2 * _REMEMBERED):
        allowances.take(PeerId(str(number)), 1, 0.0)
    assert len(allowances._buckets) == _REMEMBERED


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5000)), min_size=1, max_size=60))
def test_whoever_waits_as_told_never_exceeds_its_rate(sent: list[tuple[float, int]]) -> None:
    allowances, now, total = Allowances(EACH), 0.0, 0
    for pause, num_bytes in sent:
        now += pause
        now += allowances.take(A, num_bytes, now)
        total += num_bytes
        assert total <= EACH.bytes_per_s * (now + EACH.burst_s) + 1e-3
