"""A mesh as a value: axes, places, labels, and what is no mesh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import UsageError
from swarmnet.ranks.layout import MeshLayout


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_rank_has_its_own_place(tensor: int, data: int) -> None:
    layout = MeshLayout(tensor, data, "zero3", devices=("cpu",) * (tensor * data))
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    assert len(set(places)) == layout.ranks == tensor * data
    assert [layout.rank(d, t) for d, t in places] == list(range(layout.ranks))
    assert all(d < data and t < tensor for d, t in places)


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        (MeshLayout(), "1"),
        (MeshLayout(devices=("cuda:3",), sequence_parallel=True, shard="zero3"), "1"),
        (MeshLayout(2, devices=("cpu",) * 2), "tp2"),
        (MeshLayout(2, sequence_parallel=True, devices=("cpu",) * 2), "tp2sp"),
        (MeshLayout(1, 4, "zero3", devices=("cpu",) * 4), "zero3x4"),
        (MeshLayout(2, 4, "dp", True, tuple(f"cuda:{n}" for n in range(8))), "tp2sp-dpx4"),
    ],
)
def test_a_label_says_what_rounds_in_its_own_way(layout: MeshLayout, label: str) -> None:
    assert layout.label == label


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((0,), "at least one rank along each axis, not 0 x 1"),
        ((1, 2, "none", False, ("cpu",) * 2), "2 ranks along the data axis share a stage: say how, by --shard dp"),
        ((2, 2, "dp", False, ("cpu",) * 3), "tensor x data = 2 x 2, but there are 3 devices"),
        ((2, 1, "none", False, ("cpu", "cuda:0")), "all on one kind of device, not on cpu, cuda:0"),
    ],
)
def test_what_is_no_mesh(arguments: tuple, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        MeshLayout(*arguments)
