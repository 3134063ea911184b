"""The leader's book: sets stay disjoint, the evicted never own again. Stateful, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarmnet.ids import Generation, PeerId
from swarmnet.step.ledger import Ledger

SIZE = 6
A, B = PeerId("A"), PeerId("B")
peers = st.sampled_from([A, B, PeerId("C")])
generations = st.builds(Generation, st.integers(0, 1), st.integers(0, 2))
owners = st.tuples(peers, generations)
index_sets = st.frozensets(st.integers(0, SIZE - 1))


class Bookkeeping(RuleBasedStateMachine):
    """Every operation a leader performs, as it performs it, beside a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(SIZE)
        self.model: dict[int, tuple[PeerId, Generation]] = {}
        self.closed: set[tuple[PeerId, Generation]] = set()

    @rule(owner=owners, index=st.integers(0, SIZE - 1))
    def claim(self, owner, index):
        if owner in self.closed:
            return  # the leader has no such member
        before = self.model.get(index)
        assert self.ledger.claim(owner, index) == self.model.setdefault(index, owner)
        assert before is None or self.model[index] == before  # nothing is ever taken by a claim (I3)

    @rule(owner=owners, indexes=index_sets)
    def report(self, owner, indexes):
        overlaps = any(index in self.model and self.model[index][0] != owner[0] for index in indexes)
        assert self.ledger.overlaps(owner[0], indexes) == overlaps
        if not overlaps and owner not in self.closed:
            self.ledger.enter(owner, indexes)
            self.model.update(dict.fromkeys(indexes, owner))

    @rule(owner=owners)
    def evict(self, owner):
        self.ledger.evict(owner)
        self.closed.add(owner)
        self.model = {index: held for index, held in self.model.items() if held != owner}

    @rule(owner=owners, indexes=index_sets)
    def release(self, owner, indexes):
        mine = {index for index in indexes if self.model.get(index) == owner}
        assert self.ledger.release(owner, indexes) == bool(mine)
        for index in mine:
            del self.model[index]

    @invariant()
    def agrees(self):
        assert {i: held for i, held in enumerate(self.ledger.owners) if held is not None} == self.model
        assert self.ledger.free() == [index for index in range(SIZE) if index not in self.model]
        assert self.ledger.complete == (len(self.model) == SIZE)
        for peer in (A, B):
            assert self.ledger.of(peer) == {i for i, held in self.model.items() if held[0] == peer}

    @invariant()
    def contributions_are_disjoint_and_never_of_the_evicted(self):
        sets = self.ledger.contributions()
        counted = [index for _, _, indexes in sets for index in indexes]
        assert sorted(counted) == sorted(self.model)
        assert not {(peer, generation) for peer, generation, _ in sets} & self.closed
        assert list(sets) == sorted(sets, key=lambda entry: entry[:2])

    @invariant()
    def freed_is_what_lost_its_owner(self):
        assert self.ledger.freed <= set(self.ledger.free())


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_new_generation_of_the_same_peer_takes_over_its_entries():
    ledger = Ledger(2)
    ledger.claim((A, Generation(7, 0)), 0)
    assert not ledger.overlaps(A, frozenset({0}))
    ledger.enter((A, Generation(7, 1)), frozenset({0}))
    ledger.evict((A, Generation(7, 0)))  # late: closes the old generation only
    assert ledger.owners == [(A, Generation(7, 1)), None]


@pytest.mark.parametrize("indexes", [frozenset({99}), frozenset({0, 99})])
def test_releasing_what_does_not_exist_is_harmless(indexes):
    ledger = Ledger(1)
    ledger.claim((A, Generation(0, 0)), 0)
    ledger.release((A, Generation(0, 0)), indexes)
    assert ledger.owners in ([None], [(A, Generation(0, 0))])
