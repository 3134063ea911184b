"""What autograd saves of a forward waits for backward in host memory (as in arXiv:2101.06840, of activations).

The way there runs beside the compute that follows, on a stream of its own; the way back on the stream of backward. Host
memory is pinned, and torch keeps freed pinned blocks for the next microbatch. Knows no model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Offload:
    """Moves saved tensors of `device` out and back. What has fewer than `least` bytes stays where it is.

    On the CPU it copies from host memory to host memory, which is good for tests only.
    """

    def __init__(self, device: torch.device, *, least: int = 1 << 16) -> None:
        self._device, self._least = device, least
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def saving(self, stay: Iterable[Tensor]) -> Iterator[None]:
        """For one forward. stay: what lives on anyway (weights, tables) and is not moved.

        A tensor that several operations save is moved out once.
        """
        staying = frozenset(tensor.untyped_storage()._cdata for tensor in stay)  # of fake tensors, too: no address
        moved: dict[tuple[object, ...], tuple[StorageWeakRef, _Moved]] = {}

        def pack(tensor: Tensor) -> Tensor | _Moved:
            storage = tensor.untyped_storage()
            if storage._cdata in staying or tensor.numel() * tensor.element_size() < self._least:
                return tensor
            key = (
                storage._cdata,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor._version,
            )
            found = moved.get(key)
            if found is None or _gone(found[0]):
                found = moved[key] = _weakly(storage), _Moved(tensor, self._stream)
            return found[1]

        with saved_tensors_hooks(pack, lambda kept: kept.back() if isinstance(kept, _Moved) else kept):
            yield


class _Moved:
    """One tensor in host memory, with the strides it had, where they have no gaps."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._device, self._ready = tensor.device, None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not given out again before it is copied
        self._ready = stream.record_event()

    def back(self) -> Tensor:
        """A copy on the device it came from."""
        if self._ready is None:
            return self._host.clone()
        torch.cuda.current_stream(self._device).wait_event(self._ready)
        return self._host.to(self._device, non_blocking=True)


def _weakly(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _gone(storage: StorageWeakRef) -> bool:
    """Is it freed? Its address may be another tensor's then."""
    return bool(storage.expired())  # type: ignore[no-untyped-call]
