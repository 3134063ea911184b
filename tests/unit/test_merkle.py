"""Paths to a root of works: what was counted is proven, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.audit.merkle import leaf, path, root, verify_path
from swarmnet.bounds import MAX_INDEXES
from swarmnet.messages import MAX_PATH, WorkRecord

indexes = st.integers(0, 70) | st.integers(0, MAX_INDEXES - 1)
digests = st.binary(min_size=32, max_size=32)
counted = st.dictionaries(indexes, digests, min_size=1, max_size=20)

WORK = WorkRecord(6, bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32, bytes([4]) * 32, -1.5, 64)


@given(counted)
def test_every_leaf_is_proven_under_its_own_index(leaves: dict[int, bytes]) -> None:
    top = root(leaves)
    assert len(top) == 32 and top == root(dict(reversed(leaves.items())))
    for index, held in leaves.items():
        proof = path(leaves, index)
        assert len(proof) == 32 * max(leaves).bit_length() <= 32 * MAX_PATH
        assert verify_path(held, index, proof, top)


@given(counted, st.data())
def test_nothing_else_is_proven(leaves: dict[int, bytes], data: st.DataObject) -> None:
    top, index = root(leaves), data.draw(st.sampled_from(sorted(leaves)))
    proof, held = path(leaves, index), leaves[index]
    other = data.draw(st.integers(-1, MAX_INDEXES).filter(lambda other: other != index))
    assert not verify_path(held, other, proof, top), "under another index"
    place = data.draw(st.integers(0, 31))
    changed = bytes(byte ^ (at == place) for at, byte in enumerate(held))
    assert not verify_path(changed, index, proof, top), "another work"
    assert not verify_path(held, index, proof + bytes(32), top), "longer"
    assert not verify_path(held, index, proof + b"\0", top), "no number of hashes"
    if proof:
        assert not verify_path(held, index, proof[:-32], top), "shorter"
        at = data.draw(st.integers(0, len(proof) - 1))
        assert not verify_path(held, index, proof[:at] + bytes([proof[at] ^ 1]) + proof[at + 1 :], top), "another way"


@given(counted, counted)
def test_other_works_have_another_root(one: dict[int, bytes], other: dict[int, bytes]) -> None:
    assert (root(one) == root(other)) == (one == other)


@given(counted, st.integers(0, MAX_INDEXES - 1))
def test_what_was_not_counted_has_no_path(leaves: dict[int, bytes], index: int) -> None:
    """Not even as what an empty place is taken for, or as a node."""
    if index in leaves:
        return
    for held in (bytes(32), hashlib.sha256(bytes(32)).digest(), *leaves.values()):
        assert not verify_path(held, index, path(leaves, index), root(leaves))


def test_a_node_is_no_leaf() -> None:
    """The classical second preimage: the two halves of a tree, given as works of a smaller one."""
    leaves = {index: bytes([index]) * 32 for index in range(4)}
    upper = path(leaves, 0)[32:] + path(leaves, 2)[32:]
    assert root({0: upper[32:], 1: upper[:32]}) != root(leaves)
    assert not verify_path(upper[32:], 0, upper[:32], root(leaves))


def test_a_step_without_works_has_a_root_and_indexes_have_a_bound() -> None:
    assert root({}) != root({0: bytes(32)}) and len(root({})) == 32
    for index in (-1, 1 << MAX_PATH):
        with pytest.raises(ValueError, match="no such index"):
            root({index: bytes(32)})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WorkRecord)])
def test_a_leaf_is_of_every_field(field: str) -> None:
    value = getattr(WORK, field)
    changed = bytes([value[0] ^ 1]) + value[1:] if isinstance(value, bytes) else value + 1
    assert leaf(dataclasses.replace(WORK, **{field: changed})) != leaf(WORK)
