"""A stage's state as safetensors bytes: weights under their own names, optimizer moments under `optimizer.<moment>.`,
where two versions of the weights are in use those of the version before under `previous.`, and where replicas train on
their own (`averaging.sync = "local"`) what they share under `outer.`.

Everything is fp32 and in full layout, on any device; the metadata holds the version.

Equal states give equal bytes, so sources can be compared by digest. Hence a header of our own making: names sorted, one
size for all versions of a stage, so that the tensors can be copied to their offsets before the header is needed.
Reading trusts nothing: the header has to be the one that we would write, and all numbers finite.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from swarmnet.config.table import LARGEST_INTEGER
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.stage.accumulator import largest_magnitude

FORMAT = "swarmnet.stage.1"
_ALIGN = 64
_PIECE_BYTES = 16 << 20
"""From a GPU to the host at a time: milliseconds on its way, far more than it costs to ask for."""


def moment_name(moment: str, parameter: str) -> str:
    """Name of an optimizer moment of `parameter`."""
    return f"optimizer.{moment}.{parameter}"


def previous_name(parameter: str) -> str:
    """Name of the weights of `parameter` one version earlier."""
    return f"previous.{parameter}"


def slow_name(parameter: str) -> str:
    """Name of the slow weights of `parameter` (`stage.outer`)."""
    return f"outer.slow.{parameter}"


def outer_momentum_name(parameter: str) -> str:
    """Name of the outer momentum of `parameter` (`stage.outer`)."""
    return f"outer.momentum.{parameter}"


class Layout:
    """The offset of each tensor of a stage in its snapshots; the same for every version."""

    def __init__(self, shapes: Mapping[str, torch.Size], *, stage: int) -> None:
        self._stage = stage
        self._entries: dict[str, Any] = {}
        end = 0
        # Sorted, so that equal states give equal bytes.
        for name in sorted(shapes):
            start, end = end, end + 4 * shapes[name].numel()
            self._entries[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [start, end]}
        # Large enough for the header of any version: each tensor has the same offset in all of them.
        longest = 8 + len(self._header(LARGEST_INTEGER))
        self._begin = -(-longest // _ALIGN) * _ALIGN
        self.num_bytes = self._begin + end

    def memory(self) -> Tensor:
        """CPU memory for one snapshot: [num_bytes] uint8. Touched, which costs far more than filling it."""
        return torch.empty(self.num_bytes, dtype=torch.uint8).zero_()

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The view of each tensor in `memory`."""
        found = {}
        for name, entry in self._entries.items():
            start, end = (self._begin + offset for offset in entry["data_offsets"])
            found[name] = memory[start:end].view(torch.float32).view(entry["shape"])
        return found

    def seal(self, memory: Tensor, *, version: int) -> memoryview:
        """Write the header in front of the tensors: now it is a snapshot."""
        memory[: self._begin] = torch.frombuffer(bytearray(self.front(version)), dtype=torch.uint8)
        return memory.numpy().data

    def front(self, version: int) -> bytes:
        """The bytes before the tensors."""
        # JSON may end in spaces, so a shorter header is padded.
        header = self._header(version).ljust(self._begin - 8)
        return len(header).to_bytes(8, "little") + header

    def _header(self, version: int) -> bytes:
        metadata = {"swarmnet": f"{FORMAT} stage={self._stage} version={version}"}
        return json.dumps({"__metadata__": metadata, **self._entries}).encode()


def unpack(
    data: bytes | memoryview, shapes: Mapping[str, torch.Size], *, stage: int, version: int
) -> dict[str, Tensor]:
    """The tensors of a snapshot of (stage, version): exactly the names and shapes asked for, fp32, finite.

    Raises BadMessage: MALFORMED (another stage, version, format or parameters, or cut short), NON_FINITE.
    """
    layout, raw = Layout(shapes, stage=stage), bytearray(data)
    front = layout.front(version)
    if len(raw) != layout.num_bytes or not raw.startswith(front):
        found, expected = (repr(bytes(each[8:100])) for each in (raw, front))
        raise BadMessage(RejectCode.MALFORMED, "not the snapshot asked for", found=found, expected=expected)
    tensors = layout.views(torch.frombuffer(raw, dtype=torch.uint8))
    for name, tensor in tensors.items():
        # One NaN would spread through the whole run with the next sums.
        if not math.isfinite(largest_magnitude([tensor])):
            raise BadMessage(RejectCode.NON_FINITE, "NaN or infinity in a snapshot", name=name)
    return tensors


def digest(tensors: Iterable[Tensor]) -> bytes:
    """BLAKE3 over the BLAKE3 of each tensor: equal if and only if all bits are. Any thread."""
    whole = blake3()
    for tensor in tensors:
        one = blake3()
        for piece in _host_pieces(tensor):
            one.update(piece)
        whole.update(one.digest())
    return whole.digest()


def _host_pieces(tensor: Tensor) -> Iterator[memoryview]:
    """All bytes of `tensor` in row-major order, piece by piece. The tensor must not change meanwhile."""
    flat, stream = tensor.detach().contiguous().reshape(-1).view(torch.uint8), None
    # On a stream of its own a copy waits for nothing that is queued later.
    if flat.device.type == "cuda":
        stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(flat.device))  # `flat` may just have been made there
    for piece in torch.split(flat, _PIECE_BYTES):
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            here = piece.cpu()
        yield here.numpy().data
