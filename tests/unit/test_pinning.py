"""Host memory that a GPU reads directly: exactly as much as there is, and ordinary memory where CUDA refuses."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from swarmnet.ranks import memory as shared
from swarmnet.ranks import process
from swarmnet.ranks.memory import SharedMemory, pin, unpin


class Runtime:
    """`torch.cuda.cudart()`. refuses: what CUDA would, with the code of its error."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.pinned = refuses, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuses:
            self.pinned[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def runtime(monkeypatch: pytest.MonkeyPatch, refuses: int = 0) -> Runtime:
    fake = Runtime(refuses)

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return fake


def test_exactly_the_memory_that_there_is_becomes_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, memory = runtime(monkeypatch), torch.zeros(1001, dtype=torch.int64)
    assert pin(memory) and fake.pinned == {memory.data_ptr(): 8008}
    unpin(memory)
    assert not fake.pinned


def test_where_cuda_refuses_memory_stays_as_it_is_and_the_error_is_not_the_next_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(monkeypatch, refuses=2)
    forgotten: list[bool] = []
    monkeypatch.setattr(shared, "_forget_error", lambda: forgotten.append(True))
    assert not pin(torch.zeros(10)) and forgotten == [True]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "not_pinned" in caplog.text


def test_a_rank_pins_what_crosses_with_every_microbatch_and_not_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = runtime(monkeypatch)
    monkeypatch.setattr(process, "PIN_BYTES", 1 << 12)
    sizes = {"small": 1 << 12, "large": (1 << 12) + 1}
    shared_memory = SharedMemory({name: ((size,), "uint8") for name, size in sizes.items()})
    hello = {"rank": 0, "ranks": 1, "device": "cuda:0", "settings": {}, "epoch": 1}
    context = process.RankContext(hello, shared_memory)
    assert [context.memory[name].nbytes for name in sizes] == list(sizes.values())
    assert list(fake.pinned.values()) == [1 << 12]
    shared_memory.close()


@pytest.mark.gpu
def test_memory_is_pinned_until_nobody_computes_with_it() -> None:
    from swarmnet.manifest.schema import Manifest
    from swarmnet.ranks.device_backend import DeviceBackend

    backend = DeviceBackend(Manifest().of_stage(0), device="cuda")
    memory = backend.sum_memory()
    assert memory.is_pinned()
    del backend
    gc.collect()
    assert not memory.is_pinned()
