"""Memory in common: seen through every mapping, without a name anywhere, and gone with the last of them."""

import mmap
import os
import tempfile
from pathlib import Path

import pytest
import torch

from swarmnet.ranks.memory import SharedMemory, anonymous_file


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_one_mapping_writes_the_other_reads() -> None:
    places = {"first": ((50, 50), "float32"), "second": ((1,), "uint8")}
    shared = SharedMemory(places)
    other = SharedMemory(places, os.dup(shared.descriptor))
    for name, (shape, _) in places.items():
        assert shared.places[name].shape == other.places[name].shape == shape and not shared.places[name].any()
    shared.places["first"][1, 2:4].copy_(torch.tensor([1.5, -2.0]))
    shared.places["second"].fill_(7)
    assert other.places["first"][1, 2:4].tolist() == [1.5, -2.0]
    assert other.places["second"].tolist() == [7] and torch.equal(other.places["first"], shared.places["first"])
    assert all(memory.data_ptr() % mmap.PAGESIZE == 0 for memory in other.places.values())
    shared.close()
    other.close()


def test_closing_gives_all_back_once_no_tensor_is_left() -> None:
    before = descriptors()
    shared = SharedMemory({"only": ((1 << 16,), "uint8")})
    kept = shared.places["only"][100:200]
    shared.close()
    shared.close()
    kept.fill_(7)  # who still reads is not cut off
    assert kept.sum() == 700
    del kept
    assert descriptors() == before


def test_it_has_no_name_anywhere() -> None:
    folders = [Path(folder) for folder in ("/dev/shm", tempfile.gettempdir()) if Path(folder).is_dir()]
    before = {path for folder in folders for path in folder.glob("swarmnet*")}
    shared = SharedMemory({"only": ((4096,), "uint8")})
    assert {path for folder in folders for path in folder.glob("swarmnet*")} <= before
    shared.close()


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_bytes_are_refused(num_bytes: int) -> None:
    before = descriptors()
    with pytest.raises(ValueError, match="shared memory of"):
        SharedMemory({"one": ((1,), "uint8"), "other": ((num_bytes,), "uint8")})
    assert descriptors() == before


def test_a_file_that_cannot_be_mapped_is_let_go_of() -> None:
    before = descriptors()
    with pytest.raises((OSError, ValueError, OverflowError)):
        SharedMemory({"only": ((1 << 62,), "uint8")})
    assert descriptors() == before
    os.close(anonymous_file("swarmnet-empty"))
