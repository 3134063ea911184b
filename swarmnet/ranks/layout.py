"""The ranks inside one peer: along which axes, on which devices, and which elements of a parameter each of them has.

Two axes. `tensor`: ranks that split each layer, as `model.tensor_plan` says (Megatron, arXiv:1909.08053). `data`: ranks
that split each microbatch's rows, and by `shard` also what they hold (ZeRO, arXiv:1910.02054). What the data axis cuts,
it cuts by rows of the tensor axis' slice into equal chunks, the last ones shorter or empty: torch.chunk's cut, and
FSDP2's. So whatever a rank holds of a parameter is a rectangle of it, a `Block`.

Whatever a kind cuts, each rank *speaks* for one chunk: it writes that of a sum and of a state. So every element is
written by one rank, and all ranks write equally much. Pure: knows no tensors and no group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import NF4_BLOCK, StageSpec
from swarmnet.model.tensor_plan import Slice, TensorSplit

Shard = Literal["none", "dp", "zero1", "zero2", "zero3"]
"""What the data axis shards: "none": there is no such axis; "dp": nothing, whole copies; "zero1": moments; "zero2":
accumulators too; "zero3": parameters too."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """`tensor` x `data` ranks. Rank number = d * tensor + t. Raises UsageError for what is no mesh.

    devices: by rank, as torch names them ("cpu", "cuda:3"); all of one kind.
    """

    tensor: int = 1
    data: int = 1
    shard: Shard = "none"
    sequence_parallel: bool = False
    devices: tuple[str, ...] = ("cpu",)

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.data < 1:
            raise UsageError(f"a mesh has at least one rank along each axis, not {self.tensor} x {self.data}")
        if self.shard == "none" and self.data > 1:
            raise UsageError(
                f"{self.data} ranks along the data axis share a stage: say how, by --shard dp, zero1, zero2 or zero3"
            )
        if len(self.devices) != self.ranks:
            raise UsageError(f"tensor x data = {self.tensor} x {self.data}, but there are {len(self.devices)} devices")
        # a collective has one backend: nccl or gloo
        if len({device.partition(":")[0] for device in self.devices}) > 1:
            raise UsageError(f"the ranks of a mesh are all on one kind of device, not on {', '.join(self.devices)}")

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tensor * self.data

    @property
    def kind(self) -> str:
        """The devices' kind: "cpu" or "cuda"."""
        return self.devices[0].partition(":")[0]

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(d, t): the rank's places along `data` and `tensor`."""
        assert 0 <= rank < self.ranks, rank
        return divmod(rank, self.tensor)

    def rank(self, d: int, t: int) -> int:
        """The rank at these places; the inverse of `coordinates`."""
        assert 0 <= d < self.data and 0 <= t < self.tensor, (d, t)
        return d * self.tensor + t

    @property
    def label(self) -> str:
        """What of a mesh rounds in its own way, in a word: "1", "tp2", "tp2sp", "zero3x4", "tp2sp-zero3x4"."""
        split = f"tp{self.tensor}{'sp' * self.sequence_parallel}" if self.tensor > 1 else ""
        spread = f"{self.shard}x{self.data}" if self.data > 1 else ""
        return "-".join(filter(None, (split, spread))) or "1"


What = Literal["moments", "accumulators", "parameters"]

_SHARDED_IN: Mapping[What, Sequence[Shard]] = {
    "moments": ("zero1", "zero2", "zero3"),
    "accumulators": ("zero2", "zero3"),
    "parameters": ("zero3",),
}


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a parameter: one range of places along each of its dimensions; possibly empty."""

    ranges: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths."""
        return tuple(len(places) for places in self.ranges)

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def of(self, part: Sequence[int], whole: Sequence[int]) -> Block:
        """Where it is in a tensor that has one element for several of the parameter's, along any dimension."""
        each = [length // fewer for length, fewer in zip(whole, part, strict=True)]
        ranges = zip(self.ranges, each, strict=True)
        return Block(tuple(range(places.start // size, places.stop // size) for places, size in ranges))


def chunk(length: int, index: int, count: int) -> range:
    """The `index`-th of `count` chunks of a dimension, as torch.chunk cuts it; empty where that has no more chunks."""
    most = -(-length // count)
    return range(min(index * most, length), min((index + 1) * most, length))


@dataclass(frozen=True, slots=True)
class MeshSplit:
    """How the ranks of `layout` share any stage of that run. Raises UsageError with advice if these ranks cannot."""

    spec: StageSpec
    layout: MeshLayout

    def __post_init__(self) -> None:
        rows, ranks = self.spec.training.microbatch_size, self.layout.data
        # Each rank computes the same number of whole sequences.
        if rows % ranks:
            possible = ", ".join(str(number) for number in range(1, rows + 1) if rows % number == 0)
            raise UsageError(
                f"{ranks} ranks cannot split a microbatch: training.microbatch_size = {rows} is no multiple of it. "
                f"Ranks that can: {possible}; others may split layers, by --tensor"
            )
        _ = self.tensor  # raises what is wrong with that axis
        lora, tensor = self.spec.lora, self.layout.tensor
        if lora.r and self.layout.shard == "zero3":
            raise UsageError("ZeRO-3 (--shard zero3) is not made for frozen weights (lora.r): use zero2, or --tensor")
        # Columns of o_proj and down_proj are cut, and a block of 4-bit numbers has one scale.
        model = self.spec.model
        inputs = model.num_heads * model.head_dim, model.intermediate_size
        if lora.base == "nf4" and any(size % (NF4_BLOCK * tensor) for size in inputs):
            raise UsageError(
                f'{tensor} tensor-parallel ranks would cut blocks of {NF4_BLOCK} numbers of lora.base = "nf4": '
                "use fewer ranks"
            )

    @property
    def tensor(self) -> TensorSplit:
        """How the tensor axis shares a stage."""
        layout = self.layout
        sequence_parallel = layout.sequence_parallel and layout.tensor > 1
        length = self.spec.training.sequence_length
        return TensorSplit(self.spec.model, layout.tensor, length, sequence_parallel=sequence_parallel)

    def rows(self, rank: int) -> range:
        """Which sequences of a microbatch `rank` computes."""
        share = self.spec.training.microbatch_size // self.layout.data
        d, _ = self.layout.coordinates(rank)
        return range(d * share, (d + 1) * share)

    def shards(self, what: What) -> bool:
        """Does the data axis cut `what`?"""
        # A small grid is too coarse for terms: data ranks sum theirs before they round.
        scattered = what == "accumulators" and self.spec.averaging.codec == "small"
        return self.layout.data > 1 and (scattered or self.layout.shard in _SHARDED_IN[what])

    def along_tensor(self, name: str, shape: Sequence[int], rank: int) -> Block:
        """What `rank` would hold of parameter `name`, whole of `shape`, if the data axis cut nothing."""
        held, ranges = self._slice_of(name, rank), [range(length) for length in shape]
        # The tensor axis cuts one dimension, or none.
        if held.dim is not None:
            ranges[held.dim] = range(held.start, held.stop)
        return Block(tuple(ranges))

    def held(self, what: What, name: str, shape: Sequence[int], rank: int) -> Block:
        """The elements of parameter `name`, whole of `shape`, of which `rank` holds `what`."""
        block = self.along_tensor(name, shape, rank)
        return self._chunk(block, rank) if self.shards(what) else block

    def spoken(self, name: str, shape: Sequence[int], rank: int) -> Block | None:
        """The elements that `rank` writes of what is whole; None if another rank with the same ones does."""
        owner = self._slice_of(name, rank).owner
        return self._chunk(self.along_tensor(name, shape, rank), rank) if owner else None

    def num_elements(self, what: What, shapes: Mapping[str, Sequence[int]], rank: int) -> int:
        """How many elements of `what` `rank` holds of parameters with these names and whole shapes."""
        return sum(self.held(what, name, shape, rank).num_elements for name, shape in shapes.items())

    def _slice_of(self, name: str, rank: int) -> Slice:
        """What the tensor axis leaves `rank` of the parameter with that Hugging Face name."""
        return self.tensor.slice_of(name, self.layout.coordinates(rank)[1])

    def _chunk(self, block: Block, rank: int) -> Block:
        rows, *others = block.ranges
        d, _ = self.layout.coordinates(rank)
        own = chunk(len(rows), d, self.layout.data)
        return Block((range(rows.start + own.start, rows.start + own.stop), *others))
