"""Bytes of live tensors, as operators make and drop them: what tests and benchmarks compare memory plans with."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def highest(*deltas: int) -> int:
    """The most that is live at any time, of bytes allocated (+) and freed (-), one after the other."""
    return max(itertools.accumulate(deltas, initial=0))


class LiveBytes(TorchDispatchMode):
    """Inside `with`, counts the bytes of storages that operators make, from allocation to last reference.

    Only those of its own thread, and nothing that a kernel takes inside itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._deltas: list[int] = []

    def take(self) -> tuple[int, ...]:
        """What was allocated (+) and freed (-) since the last call, one after the other."""
        taken = tuple(self._deltas)
        self._deltas.clear()
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self._meet(leaf)
        return out

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # A view shares its storage, which is counted already.
        if key in self._seen or not size:
            return

        def gone(_: Any) -> None:
            del self._seen[key]
            self._deltas.append(-size)

        self._seen[key] = weakref.ref(storage, gone)
        self._deltas.append(size)
