"""The works of a replica: bounded, of the last steps, and shown as they were pledged."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import AuditData, AuditRequest, Packed, WorkRecord
from swarmnet.pipeline.works import KEPT_STEPS, ShownWorks, WorkBook, digest, opened
from swarmnet.pledge import proves

PROOF = Packed("uint8", (1, 1, 32), bytes(32))


def tensor(value: int, size: int = 8) -> Packed:
    return Packed("fp32", (1, size // 4), bytes([value]) * size)


def shown(book: WorkBook, step: int, index: int) -> AuditData:
    found = book.shown(step, index)
    assert found is not None
    return found


def record_of(index: int, *payloads: tuple[Packed, ...], loss_sum: float = 0.0, num_tokens: int = 0) -> WorkRecord:
    return WorkRecord(index, *map(digest, payloads), loss_sum, num_tokens)


def counted(book: WorkBook, step: int, index: int, size: int = 8, made: int = 2) -> None:
    inputs, gradient = (tensor(index, size),), (tensor(index + 1, size),)
    book.add(step, record_of(index, inputs, (tensor(made),), gradient, (tensor(3),)), (*inputs, PROOF, *gradient))


def accepts(payload: tuple[Packed, ...]) -> None:
    assert payload[-1] is PROOF


def test_what_is_shown_leads_to_the_root_and_opens_to_what_went_in() -> None:
    book = WorkBook(1 << 16)
    book.begin(7)
    for index in (3, 0, 9):
        counted(book, 7, index)
    found = shown(book, 7, 9)
    assert proves(found.path, found.work, book.root(7))
    assert opened(found, accepts) == ((tensor(9),), (tensor(10),))
    assert book.shown(7, 1) is None and book.shown(6, 9) is None


def test_the_last_stage_shows_no_gradient() -> None:
    book = WorkBook(1 << 16)
    record = record_of(0, (tensor(1), tensor(2)), (), (), (tensor(3),), loss_sum=1.5, num_tokens=16)
    book.add(0, record, (tensor(1), tensor(2), PROOF))
    assert opened(shown(book, 0, 0), accepts) == ((tensor(1), tensor(2)), ())


def test_what_does_not_fit_its_record_or_the_run_is_refused() -> None:
    book = WorkBook(1 << 16)
    counted(book, 0, 3)
    found = shown(book, 0, 3)
    tokens, proof, gradient = found.payload
    for payload in ((), (gradient,), (tokens, proof), (gradient, proof, tokens), (tokens, proof, proof, gradient)):
        with pytest.raises(BadMessage, match="not what the work was made of"):
            opened(dataclasses.replace(found, payload=payload), accepts)

    def refuses(payload: tuple[Packed, ...]) -> None:
        raise BadMessage(RejectCode.MALFORMED, "other tokens")

    with pytest.raises(BadMessage, match="other tokens"):
        opened(found, refuses)


def test_a_discarded_step_has_no_works_and_an_old_one_is_forgotten() -> None:
    book = WorkBook(1 << 16)
    for step in range(KEPT_STEPS + 1):
        book.begin(step)
        counted(book, step, step)
    assert book.shown(0, 0) is None and book.shown(1, 1) is not None
    empty = WorkBook(0).root(0)
    book.discard(2)
    assert book.root(2) == empty and not book.records(2)
    counted(book, 2, 5)
    assert shown(book, 2, 5).work.index == 5 and book.root(2) != empty
    assert book.contributed(2, book.root(2))
    assert book.shown(2, 2) is None
    # The run went back: what came after is another history.
    book.begin(1)
    assert book.root(1) == book.root(3) == empty
    book.begin(0)
    assert book.num_bytes == 0


def test_works_of_a_discarded_accumulator_are_shown_until_it_is_known_which_one_contributed() -> None:
    book = WorkBook(1 << 16)
    book.begin(0)
    for index in (0, 1):
        counted(book, 0, index)
    pledged = book.root(0)
    book.discard(0)
    counted(book, 0, 1)
    counted(book, 0, 2)
    again = book.root(0)
    assert proves(shown(book, 0, 0).path, shown(book, 0, 0).work, pledged)
    assert not book.contributed(0, None), "another process of this identity has pledged"
    assert book.root(0) == again
    assert book.contributed(0, pledged)
    for index in (0, 1):
        found, bare = shown(book, 0, index), book.bare(0, index)
        assert proves(found.path, found.work, pledged) and bare is not None and bare.path == found.path
    assert book.root(0) == pledged and book.shown(0, 2) is None
    assert book.num_bytes == sum(each.num_bytes for index in (0, 1) for each in shown(book, 0, index).payload)


def test_of_two_accumulators_of_the_same_indexes_the_one_that_was_pledged_is_kept() -> None:
    """A rank is lost once its shards are sent, and the kernels make other bits of the same microbatches."""
    book = WorkBook(1 << 16)
    counted(book, 0, 3)
    pledged, record = book.root(0), book.records(0)[3]
    book.discard(0)
    counted(book, 0, 3, made=9)
    assert book.contributed(0, pledged)
    assert book.records(0) == {3: record} and shown(book, 0, 3).work == record


def test_of_a_step_that_is_discarded_without_end_the_last_works_are_kept() -> None:
    book = WorkBook(1 << 16)
    for index in range(9):
        counted(book, 0, index)
        book.discard(0)
    assert [book.bare(0, index) is not None for index in range(9)] == [False] * 7 + [True] * 2
    assert book.num_bytes == sum(each.num_bytes for index in (7, 8) for each in shown(book, 0, index).payload)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 40)), max_size=40), st.integers(0, 400))
def test_payloads_are_bounded_and_roots_do_not_depend_on_that(
    added: list[tuple[int, int, int]], cap_bytes: int
) -> None:
    book, whole = WorkBook(cap_bytes), WorkBook(1 << 30)
    for step, index, size in added:
        for each in (book, whole):
            counted(each, step, index, 4 * size)
        assert book.num_bytes <= cap_bytes
    assert [book.root(step) for step in range(3)] == [whole.root(step) for step in range(3)]
    held = [(step, index) for step in range(3) for index in range(10) if book.shown(step, index) is not None]
    assert book.num_bytes == sum(p.num_bytes for at in held for p in shown(book, *at).payload)
    for step, index in held:
        assert shown(book, step, index) == shown(whole, step, index)


def test_the_oldest_step_is_dropped_first() -> None:
    book = WorkBook(3 * (PROOF.num_bytes + 16))
    for step, index in ((1, 0), (0, 0), (1, 1), (0, 1)):
        counted(book, step, index)
    assert [book.shown(*at) is not None for at in ((0, 0), (0, 1), (1, 0), (1, 1))] == [False, True, True, True]


def test_what_was_made_is_kept_where_kernels_may_make_other_bits() -> None:
    made = (tensor(2), tensor(3))
    for keeps_made in (False, True):
        book = WorkBook(1 << 16, keeps_made=keeps_made)
        book.add(0, record_of(0, (tensor(0),), (made[0],), (tensor(1),), (made[1],)), (tensor(0), PROOF), made=made)
        assert book.made(0, 0) == (made if keeps_made else None) and book.made(0, 1) is None
        assert book.num_bytes == sum(each.num_bytes for each in (tensor(0), PROOF, *(made if keeps_made else ())))


def test_what_others_have_shown_is_bounded_too() -> None:
    book = WorkBook(1 << 16)
    for index in range(3):
        counted(book, 0, index)
    size = PROOF.num_bytes + 16
    cache, asked = ShownWorks(2 * size), [AuditRequest(0, 1, index, PeerId("liar")) for index in range(3)]
    for index in (0, 1, 0, 2):
        cache.keep(asked[index], shown(book, 0, index))
    assert [cache.get(request) is not None for request in asked] == [True, False, True]
    assert cache.num_bytes == 2 * size
    for step, kept in ((1, True), (KEPT_STEPS, True), (KEPT_STEPS + 1, False)):
        cache.begin(step)
        assert (cache.get(asked[0]) is not None) == kept and cache.num_bytes == 2 * size * kept
    cache.keep(asked[0], shown(book, 0, 0))
    cache.begin(0)  # the run went back
    assert cache.get(asked[0]) is None


@given(st.lists(st.builds(Packed, st.sampled_from(["", "a", "ab"]), st.lists(st.integers(0, 2)).map(tuple),
                          st.binary(max_size=4)), max_size=3),
       st.lists(st.builds(Packed, st.sampled_from(["", "a", "ab"]), st.lists(st.integers(0, 2)).map(tuple),
                          st.binary(max_size=4)), max_size=3))  # fmt: skip
def test_a_digest_is_of_codec_shape_and_data_of_each_tensor(one: list[Packed], other: list[Packed]) -> None:
    assert (digest(one) == digest(other)) == (one == other)
