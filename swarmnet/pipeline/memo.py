"""What a replica remembers of the current step's microbatches: a cache. Pure.

Losing an entry costs recomputation, never correctness (docs/protocol.md, I1), so it is bounded in bytes and drops the
oldest first. Entries are the bytes as they go over the wire.
"""

from __future__ import annotations

from collections import OrderedDict

from swarmnet.messages import Gradient, Packed


class Memo:
    """index -> what went down (input of the next stage) and what went up (the answer), within `cap_bytes`."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[str, int], tuple[Packed, ...] | Gradient] = OrderedDict()

    def keep_output(self, index: int, output: tuple[Packed, ...]) -> None:
        """Remember what stage k sent to stage k + 1."""
        self._keep(("down", index), output)

    def keep_answer(self, index: int, answer: Gradient) -> None:
        """Remember the answer to `Process`."""
        self._keep(("up", index), answer)

    def output(self, index: int) -> tuple[Packed, ...] | None:
        """What was sent to the next stage, if still known."""
        entry = self._entries.get(("down", index))
        return entry if isinstance(entry, tuple) else None

    def answer(self, index: int) -> Gradient | None:
        """The answer, if still known."""
        entry = self._entries.get(("up", index))
        return entry if isinstance(entry, Gradient) else None

    def clear(self) -> None:
        """The step is applied."""
        self._entries.clear()
        self.num_bytes = 0

    def _keep(self, key: tuple[str, int], entry: tuple[Packed, ...] | Gradient) -> None:
        size = _size(entry)
        before = self._entries.pop(key, None)
        if before is not None:
            self.num_bytes -= _size(before)
        if size > self.cap_bytes:
            return
        self._entries[key] = entry
        self.num_bytes += size
        while self.num_bytes > self.cap_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= _size(dropped)


def _size(entry: tuple[Packed, ...] | Gradient) -> int:
    payload = entry.payload if isinstance(entry, Gradient) else entry
    return sum(packed.num_bytes for packed in payload) + 64
