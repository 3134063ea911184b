"""How much memory live tensors take while code runs: every storage from its allocation to its last reference.

Works on real tensors and on fake ones (torch's FakeTensorMode), which have shapes and no memory: so a stage that fits
no machine here can be run to see what it would take. What a kernel takes inside itself does not show; on the CPU
nothing else is missing, to the byte (tests/numerics/test_plan.py). Knows no stage.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

IsHost = Callable[[Any, dict[str, Any]], bool]
"""(operator, its keyword arguments): is what it makes meant for host memory?"""


def moves_out(operator: Any, kwargs: dict[str, Any]) -> bool:
    """Of tensors that are all on the CPU, which would be in host memory beside a device: those that `model.activations`
    makes, for it alone asks for a like tensor in a place by name."""
    return operator is torch.ops.aten.empty_like.default and kwargs.get("device") is not None


def _is_long(tensor: Tensor, size: int) -> bool:
    """Is it a vector to be gone through piece by piece?"""
    return tensor.ndim == 1 and tensor.numel() > 4 * size


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Inside `with`, counts the bytes of storages that operators make. Counts only its own thread's.

    deltas: what was allocated (+) and freed (-) since `take`, one after the other. host: the same in host memory,
    as `is_host` says. shapes_only: tensors are fake, so their values are 0; and where a vector is gone through piece by
    piece, one piece stands for all.
    """

    def __init__(self, is_host: IsHost = lambda operator, kwargs: False, *, shapes_only: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_host, self._shapes_only = is_host, shapes_only
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._device: list[int] = []
        self._host: list[int] = []

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(deltas, host deltas) since the last call."""
        taken = tuple(self._device), tuple(self._host)
        self._device.clear()
        self._host.clear()
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # Code may ask for a value that a fake tensor has not; 0 takes the usual branch.
        if self._shapes_only and func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if self._shapes_only and func is torch.ops.aten.split.Tensor and _is_long(*args[:2]):
            return [args[0].narrow(0, 0, args[1])]
        out = func(*args, **kwargs)
        deltas = self._host if self._is_host(func, kwargs) else self._device
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self._meet(leaf, deltas)
        return out

    def _meet(self, tensor: Tensor, deltas: list[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # A view shares its storage, which is counted already.
        if key in self._seen or not size or tensor.device.type == "meta":
            return

        def gone(_: Any) -> None:
            del self._seen[key]
            deltas.append(-size)

        self._seen[key] = weakref.ref(storage, gone)
        deltas.append(size)


@contextlib.contextmanager
def imagined() -> Iterator[LiveBytes]:
    """Inside `with`, tensors of this thread have shapes and no memory, and what they would take is counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second of imports, of those who plan

    with FakeTensorMode(), LiveBytes(moves_out, shapes_only=True) as live:
        yield live
