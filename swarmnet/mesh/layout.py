"""The ranks inside one peer: how many, along which axes, on which devices. Pure: a value, and nothing that acts on it.

Two axes. `tensor`: ranks that split each layer (Megatron, arXiv:1909.08053), `data`: ranks that split each microbatch's
rows, and by `shard` also what they hold (ZeRO, arXiv:1910.02054). Knows neither torch nor a model: whether a model
can be split so is `model.slices` and `peer.ranks` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swarmnet.errors import UsageError

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

    def record(self) -> dict[str, Any]:
        """As JSON, for rank processes."""
        return {
            "tensor": self.tensor,
            "data": self.data,
            "shard": self.shard,
            "sequence_parallel": self.sequence_parallel,
            "devices": list(self.devices),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> MeshLayout:
        """What `record` wrote."""
        return cls(**{**record, "devices": tuple(record["devices"])})
