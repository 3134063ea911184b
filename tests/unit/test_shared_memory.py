"""Memory in common: seen through every mapping, without a name anywhere, and gone with the last of them."""

import mmap
import os
import tempfile
from pathlib import Path

import pytest
import torch

from swarmnet.ranks.memory import SharedMemory, anonymous_file, mapped


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_one_mapping_writes_the_other_reads() -> None:
    shared = SharedMemory(3, 10_000)
    other = mapped(shared.descriptor)
    assert shared.id == 3 and shared.bytes.shape == other.shape == (10_000,) and not shared.bytes.any()
    shared.bytes[8:16].view(torch.float32).copy_(torch.tensor([1.5, -2.0]))
    assert other[8:16].view(torch.float32).tolist() == [1.5, -2.0] and other.data_ptr() != shared.bytes.data_ptr()
    shared.close()


def test_closing_gives_all_back_once_no_tensor_is_left() -> None:
    before = descriptors()
    shared = SharedMemory(0, 1 << 16)
    kept = shared.bytes[100:200]
    shared.close()
    shared.close()
    kept.fill_(7)  # who still reads is not cut off
    assert kept.sum() == 700
    del kept
    assert descriptors() == before


def test_it_has_no_name_anywhere() -> None:
    folders = [Path(folder) for folder in ("/dev/shm", tempfile.gettempdir()) if Path(folder).is_dir()]
    before = {path for folder in folders for path in folder.glob("swarmnet*")}
    shared = SharedMemory(0, 4096)
    assert {path for folder in folders for path in folder.glob("swarmnet*")} <= before
    shared.close()


def test_nobody_cuts_it_short_under_a_reader() -> None:
    shared = SharedMemory(0, 2 * mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.descriptor, mmap.PAGESIZE)
    shared.close()


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_bytes_are_refused(num_bytes: int) -> None:
    before = descriptors()
    with pytest.raises(ValueError, match="shared memory of"):
        SharedMemory(0, num_bytes)
    assert descriptors() == before


def test_a_file_that_cannot_be_mapped_is_let_go_of() -> None:
    before = descriptors()
    with pytest.raises((OSError, ValueError, OverflowError)):
        SharedMemory(0, 1 << 62)
    assert descriptors() == before
    os.close(anonymous_file("swarmnet-empty"))
