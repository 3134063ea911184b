"""Ranks that communicate through shared memory; here threads over one tensor of bytes."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.model.comm import Comm
from swarmnet.ranks import shared_comm
from swarmnet.ranks.shared_comm import SharedBuffers, SharedComm
from tests.contracts.comm_contract import CHECKS

PATIENCE_S = 60.0


def buffers_of(ranks: int) -> list[SharedBuffers]:
    """In memory that is full of what earlier ranks have left."""
    memory = torch.full((SharedBuffers.num_bytes(ranks),), 7, dtype=torch.uint8)
    return [SharedBuffers(memory, rank, ranks) for rank in range(ranks)]


def run(ranks: int, body: Callable[[SharedBuffers], Any]) -> list[Any]:
    """What `body` makes on each rank. Raises what one raises; the others may then wait for ever."""
    ended: queue.Queue[tuple[int, Any, Exception | None]] = queue.Queue()

    def thread(buffers: SharedBuffers) -> None:
        try:
            ended.put((buffers.rank, body(buffers), None))
        except Exception as error:
            ended.put((buffers.rank, None, error))

    for buffers in buffers_of(ranks):
        threading.Thread(target=thread, args=(buffers,), daemon=True).start()
    found = {}
    for _ in range(ranks):
        rank, value, error = ended.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        found[rank] = value
    return [found[rank] for rank in range(ranks)]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tensors need several pieces."""
    monkeypatch.setattr(shared_comm, "BUFFER_BYTES", 64)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[Comm], None], size: int) -> None:
    run(size, lambda buffers: check(SharedComm(buffers, range(size))))


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_piece_by_piece(check: Callable[[Comm], None]) -> None:
    run(3, lambda buffers: check(SharedComm(buffers, range(3))))


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * 10.0 ** torch.randint(-3, 4, shape, generator=generator)).to(dtype)


@pytest.mark.usefixtures("small_buffers")
@settings(max_examples=30)
@given(
    ranks=st.integers(2, 4),
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_a_sum_is_taken_in_order_of_rank(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    terms = [of_rank(rank, (ranks, *shape), dtype, seed) for rank in range(ranks)]
    total = reduce(torch.add, terms)

    def body(buffers: SharedBuffers) -> tuple[Tensor, Tensor]:
        comm = SharedComm(buffers, range(ranks))
        return comm.all_reduce(terms[buffers.rank]), comm.reduce_scatter(terms[buffers.rank], 0)

    for rank, (whole, part) in enumerate(run(ranks, body)):
        assert torch.equal(whole, total) and torch.equal(part, total[rank : rank + 1])


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("seed", range(5))
def test_groups_take_turns_with_the_same_buffers(seed: int) -> None:
    """All of four ranks, the rows 0 1 and 2 3, the columns 0 2 and 1 3."""
    turns = random.Random(seed).choices(["all", "row", "column"], k=30)

    def body(buffers: SharedBuffers) -> None:
        row, column = divmod(buffers.rank, 2)
        groups = {"all": [0, 1, 2, 3], "row": [2 * row, 2 * row + 1], "column": [column, column + 2]}
        comms = {name: SharedComm(buffers, ranks) for name, ranks in groups.items()}
        for turn, name in enumerate(turns):
            gathered = comms[name].all_gather(torch.full((11,), 100 * turn + buffers.rank), 0).view(-1, 11)
            assert gathered.unique(dim=1).flatten().tolist() == [100 * turn + rank for rank in groups[name]]

    run(4, body)


def test_a_piece_stays_until_all_have_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Exception):
        """A rank would have to."""

    def wait(semaphore: Any) -> None:
        if shared_comm._look(semaphore) != 0:
            raise Waits

    monkeypatch.setattr(shared_comm, "_wait", wait)
    first, second = buffers_of(2)
    with pytest.raises(Waits):  # its piece is there, the other's not yet
        second.exchange(torch.tensor([2.0]), [0, 1], call=1)
    pieces = first.exchange(torch.tensor([1.0]), [0, 1], call=1)
    assert [piece.item() for piece in pieces] == [1.0, 2.0]
    first.done()
    with pytest.raises(Waits):
        first.exchange(torch.tensor([3.0]), [0, 1], call=2)
    assert pieces[0].item() == 1.0
    second.done()
    with pytest.raises(Waits):  # now for the other's next piece only
        first.exchange(torch.tensor([3.0]), [0, 1], call=2)
    assert pieces[0].item() == 3.0


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce(torch.zeros(2 + comm.rank)),
        lambda comm: comm.all_reduce(torch.zeros(2), "max" if comm.rank else "sum"),
        lambda comm: comm.all_reduce(torch.zeros(2, dtype=torch.float64 if comm.rank else torch.float32)),
        lambda comm: comm.all_gather(torch.zeros(2), 0) if comm.rank else comm.reduce_scatter(torch.zeros(2), 0),
    ],
    ids=["length", "operation", "dtype", "collective"],
)
def test_ranks_that_call_different_things_are_told(call: Callable[[Comm], object]) -> None:
    with pytest.raises(RuntimeError, match="called different collectives"):
        run(2, lambda buffers: call(SharedComm(buffers, range(2))))
