"""What a replica remembers: within its cap whatever comes, the newest longest, and the very bytes that were sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.messages import Fetched, Gradient, Packed
from swarmnet.pipeline.recovery import OutputCache

OVERHEAD = 64


def packed(num_bytes: int) -> tuple[Packed, ...]:
    return (Packed("raw", (num_bytes,), bytes(num_bytes)),)


def output(num_bytes: int) -> Fetched:
    return Fetched(packed(num_bytes))


def answer(num_bytes: int) -> Gradient:
    return Gradient(1.0, 2, 0.5, packed(num_bytes))


def test_what_was_sent_is_handed_out_again_uncopied() -> None:
    memo, sent, said = OutputCache(1000), output(100), answer(100)
    memo.keep(3, sent)
    memo.keep(3, said)
    assert memo.output(3) is sent and memo.answer(3) is said
    assert memo.output(4) is None and memo.answer(4) is None
    assert memo.num_bytes == 2 * (100 + OVERHEAD)


def test_the_oldest_is_dropped_first_and_what_never_fits_is_not_kept() -> None:
    memo = OutputCache(3 * (100 + OVERHEAD))
    for index in range(4):
        memo.keep(index, output(100))
    assert [memo.output(index) is not None for index in range(4)] == [False, True, True, True]
    memo.keep(9, answer(1000))
    assert memo.answer(9) is None and memo.output(3) is not None


@given(
    cap=st.integers(0, 2000),
    events=st.lists(
        st.tuples(st.sampled_from(["out", "answer", "clear"]), st.integers(0, 5), st.integers(0, 500)), max_size=60
    ),
)
def test_it_never_holds_more_than_its_cap_and_never_lies(cap: int, events: list[tuple[str, int, int]]) -> None:
    memo, last = OutputCache(cap), {}
    for kind, index, size in events:
        if kind != "clear":
            last[kind, index] = output(size) if kind == "out" else answer(size)
            memo.keep(index, last[kind, index])
        else:
            memo.clear()
            last.clear()
        held = [memo.output(i) for i in range(6)] + [memo.answer(i) for i in range(6)]
        sizes = [sum(p.num_bytes for p in e.payload) for e in held if e is not None]
        assert memo.num_bytes == sum(sizes) + OVERHEAD * len(sizes) <= cap
        for i in range(6):
            assert memo.output(i) in (None, last.get(("out", i))) and memo.answer(i) in (None, last.get(("answer", i)))


def test_size_zero_remembers_nothing_not_even_an_empty_answer() -> None:
    memo = OutputCache(0)
    memo.keep(0, Gradient(1.0, 2))
    memo.keep(0, output(0))
    assert memo.answer(0) is None and memo.output(0) is None and memo.num_bytes == 0
