"""The tree of training windows: a path proves one window at one place of one stream, and nothing else."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.data.windows import WindowRoot, WindowTree

ROOT = "124dd5422fb60c7d299e9a96c3472b70230038960f71c7067647ec2e285d1a93"


def stream(num_tokens: int, seed: int = 0, dtype: type = np.uint16) -> Tokens:
    ids = np.random.default_rng(seed).integers(0, 200, num_tokens).astype(dtype)
    return Tokens(ids, vocab_size=200, source="here.txt", tokenizer_sha256="e" * 64)


def tree(count: int, length: int, seed: int = 0) -> WindowTree:
    return WindowTree(stream(count * length + 1 + seed, seed), length, count)


def window(tokens: Tokens, number: int, length: int) -> bytes:
    return tokens.ids[number * length : (number + 1) * length + 1].astype("<i4").tobytes()


def by_definition(leaves: list[bytes]) -> bytes:
    """The top of the tree of RFC 6962: the left part is the largest power of two below the whole."""
    if len(leaves) == 1:
        return sha256(b"\0" + leaves[0]).digest()
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return sha256(b"\1" + by_definition(leaves[:left]) + by_definition(leaves[left:])).digest()


counts, lengths = st.integers(1, 70), st.integers(1, 9)


@given(counts, lengths)
def test_the_root_is_that_of_the_definition(count: int, length: int) -> None:
    tokens = stream(count * length + 1)
    top = by_definition([window(tokens, number, length) for number in range(count)])
    root = sha256(b"\2" + count.to_bytes(8, "little") + (length + 1).to_bytes(8, "little") + top).hexdigest()
    assert WindowTree(tokens, length, count).root == root


def test_this_root_never_changes() -> None:
    """It is in manifests."""
    tokens = Tokens(np.arange(1000, dtype=np.uint16), vocab_size=1000, source="", tokenizer_sha256="")
    assert WindowTree(tokens, 7, 141).root == ROOT


@given(counts, lengths, st.data())
def test_a_path_proves_its_window(count: int, length: int, data: st.DataObject) -> None:
    here = tree(count, length)
    number = data.draw(st.integers(0, count - 1))
    found, path = window(stream(count * length + 1), number, length), here.path(number)
    assert len(path) == 32 * here.proven.depth and here.proven.depth == (count - 1).bit_length()
    assert here.proven.proves(number, found, path)


@given(counts, lengths, st.data())
def test_whatever_is_changed_proves_nothing(count: int, length: int, data: st.DataObject) -> None:
    here = tree(count, length)
    number = data.draw(st.integers(0, count - 1))
    found, path = window(stream(count * length + 1), number, length), here.path(number)
    bit = data.draw(st.integers(0, 8 * (len(found) + len(path)) - 1))
    changed = bytearray(found + path)
    changed[bit // 8] ^= 1 << bit % 8
    assert not here.proven.proves(number, bytes(changed[: len(found)]), bytes(changed[len(found) :]))


@given(st.integers(2, 70), lengths, st.data())
def test_a_path_is_of_one_place_and_one_count(count: int, length: int, data: st.DataObject) -> None:
    """Also where all windows hold the same tokens."""
    tokens = Tokens(np.zeros(count * length + 1, np.uint8), vocab_size=2, source="", tokenizer_sha256="")
    here = WindowTree(tokens, length, count)
    number, other = data.draw(st.integers(0, count - 1)), data.draw(st.integers(-3, count + 3))
    found, path = window(tokens, number, length), here.path(number)
    known = here.proven
    if not 0 <= other < count:
        assert not known.proves(other, found, path)
    for wrong in {known.num_windows + 1, known.num_windows - 1, 2 * known.num_windows}:
        if wrong > number:
            assert not WindowRoot(known.root, wrong, length).proves(number, found, path)
    assert not WindowRoot(known.root, count, length + 1).proves(number, found + bytes(4), path)


@given(st.integers(2, 70), st.data())
def test_no_window_stands_for_another(count: int, data: st.DataObject) -> None:
    tokens = stream(4 * count + 1)
    here = WindowTree(tokens, 4, count)
    one, other = data.draw(st.tuples(*[st.integers(0, count - 1)] * 2).filter(lambda pair: pair[0] != pair[1]))
    assert not here.proven.proves(other, window(tokens, one, 4), here.path(one))


@pytest.mark.parametrize("count", [3, 5, 6, 7, 11])
def test_a_node_that_moves_up_has_zeros_beside_it_and_nothing_else(count: int) -> None:
    here, last = tree(count, 4), count - 1
    found, path = window(stream(4 * count + 1), last, 4), here.path(last)
    level = next(level for level in range(here.proven.depth) if (last >> level) ^ 1 >= -(-count // (1 << level)))
    assert path[32 * level : 32 * level + 32] == bytes(32)
    doubled = path[: 32 * level] + sha256(b"\0" + found).digest() + path[32 * level + 32 :]
    assert not here.proven.proves(last, found, doubled)


def test_a_doubled_last_window_is_another_stream() -> None:
    """What CVE-2012-2459 was about: trees that fill up with copies give both one root."""
    tokens = Tokens(np.zeros(100, np.uint8), vocab_size=2, source="", tokenizer_sha256="")
    assert len({WindowTree(tokens, 4, count).root for count in range(1, 24)}) == 23


def test_inner_nodes_are_no_windows() -> None:
    """Two hashes are as long as a window of sixteen tokens; the first byte tells them apart."""
    length = 15
    tokens = stream(4 * length + 1)
    here = WindowTree(tokens, length, 4)
    leaves = [sha256(b"\0" + window(tokens, number, length)).digest() for number in range(4)]
    upper = WindowRoot(here.proven.root, 4, length)
    assert len(leaves[0] + leaves[1]) == 4 * (length + 1)
    pairs = [sha256(b"\1" + leaves[at] + leaves[at + 1]).digest() for at in (0, 2)]
    assert not upper.proves(0, leaves[0] + leaves[1], pairs[1])
    assert not upper.proves(0, leaves[0] + leaves[1], pairs[1] + bytes(32))


@pytest.mark.parametrize("num_tokens", [400, 40_000])
def test_every_microbatch_of_the_sampler_can_be_proven(num_tokens: int) -> None:
    tokens, sampler = stream(num_tokens), Sampler(3, num_tokens, 16, 4)
    here = WindowTree(tokens, 16, sampler.num_windows)
    for index in range(0, 300, 17):
        rows = tokens.microbatch(sampler.positions(index), 16).numpy()
        for number, row in zip(sampler.windows(index), rows, strict=True):
            assert here.proven.proves(number, row.tobytes(), here.path(number))


def test_the_array_that_holds_the_ids_does_not_matter_nor_how_many_chunks_there_are() -> None:
    count = 9001  # of 1 KiB: more than eight chunks, the last one odd
    roots = {WindowTree(stream(count * 256 + 1, dtype=dtype), 256, count).root for dtype in (np.uint8, np.uint32)}
    assert len(roots) == 1
    seen: list[tuple[int, int]] = []
    here = WindowTree(stream(count * 256 + 1), 256, count, progress=lambda done, total: seen.append((done, total)))
    assert roots == {here.root} and seen[-1] == (count, count) and len(seen) > 8
    assert here.proven.proves(count - 1, window(stream(count * 256 + 1), count - 1, 256), here.path(count - 1))
    assert sum(map(len, here._levels)) <= 32 * count + 32 * 14
