"""The frozen weights of a stage as one file, named by its content: mapped into memory, never changed.

A run with adapters begins with a checkpoint of which each stage has its part as it rests (`model.frozen`), one tensor
after the other, at offsets that follow from the manifest. The manifest has the address of that content (`fetch.plan`),
so the file is right whoever has made it or handed it over.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from swarmnet.errors import UsageError, unwritable
from swarmnet.fetch.plan import address, piece_size
from swarmnet.manifest.schema import Base, StageSpec
from swarmnet.messages import Content
from swarmnet.model.frozen import Parts, at_rest, part_shapes
from swarmnet.model.huggingface.checkpoint import Checkpoint
from swarmnet.model.lora import frozen_shapes, stage_module

_ALIGN = 64
"""Bytes: kernels sum in an order that depends on alignment."""

_READ_BYTES = 8 << 20


class BaseLayout:
    """Where each part of each weight is. shapes: of the weights, by name."""

    def __init__(self, shapes: Mapping[str, torch.Size], base: Base) -> None:
        self.shapes, self._base = dict(shapes), base
        self._places: dict[str, dict[str, tuple[int, torch.dtype, torch.Size]]] = {}
        end = 0
        for name, shape in shapes.items():
            places = self._places[name] = {}
            for part, (dtype, held) in part_shapes(name, shape, base).items():
                start = -(-end // _ALIGN) * _ALIGN
                places[part], end = (start, dtype, held), start + dtype.itemsize * math.prod(held)
        self.num_bytes = end

    @classmethod
    def of(cls, spec: StageSpec) -> BaseLayout:
        """That of a stage."""
        return cls(frozen_shapes(stage_module(spec)), spec.lora.base)

    def content(self, whole: Callable[[str], Tensor]) -> Iterator[bytes | memoryview]:
        """The bytes of the file, in order. whole: reads a weight, fp32 on the CPU; each is read once."""
        at = 0
        for name, places in self._places.items():
            parts = at_rest(name, whole(name), self._base)
            for part, (start, _, _) in places.items():
                yield bytes(start - at)
                data = parts[part].contiguous().view(torch.uint8).numpy().data.cast("B")
                yield data
                at = start + len(data)

    def mapped(self, path: Path) -> Callable[[str], Parts]:
        """The weights in a file; what is not used takes no memory. Raises UsageError."""
        try:
            if path.stat().st_size != self.num_bytes:
                raise UsageError(f"{path}: has not the {self.num_bytes} bytes of this stage's base: delete it")
            memory = torch.from_file(str(path), shared=False, size=self.num_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from error

        def of(name: str) -> Parts:
            found = {}
            for part, (start, dtype, shape) in self._places[name].items():
                flat = memory[start : start + dtype.itemsize * math.prod(shape)]
                found[part] = flat.view(dtype).view(shape)
            return found

        return of


def described(content: Iterable[bytes | memoryview], num_bytes: int) -> Content:
    """The pieces of a content of so many bytes, of which the chunks come in order."""
    size, room, digests = piece_size(num_bytes), 0, list[bytes]()
    digest = hashlib.sha256()
    for chunk in content:
        rest = memoryview(chunk)
        while rest:
            room = room or size
            taken, rest = rest[:room], rest[room:]
            digest.update(taken)
            room -= len(taken)
            if not room:
                digests.append(digest.digest())
                digest = hashlib.sha256()
    if room:
        digests.append(digest.digest())
    return Content(num_bytes, size, b"".join(digests))


def base_root(checkpoint: Checkpoint, layout: BaseLayout) -> str:
    """What a manifest has to say of a stage's part of a checkpoint. Raises UsageError."""
    return address(described(_read(checkpoint, layout), layout.num_bytes)).hex()


def content_of(path: Path, layout: BaseLayout, *, agreed: str) -> Content | None:
    """The description of that file; None: it is not here, or damaged. Reads all of it."""
    if not path.is_file() or path.stat().st_size != layout.num_bytes:
        return None
    with path.open("rb") as file:
        content = described(iter(lambda: file.read(_READ_BYTES), b""), layout.num_bytes)
    return content if address(content).hex() == agreed else None


def write_base(path: Path, folder: Path, layout: BaseLayout, *, agreed: str) -> None:
    """Make the file of a stage from the checkpoint in `folder`. Raises UsageError: not there, or another
    one than the run begins with."""
    partial = path.with_suffix(".part")

    def written() -> Iterator[bytes | memoryview]:
        with partial.open("wb") as file:
            for chunk in _read(Checkpoint(folder), layout):
                file.write(chunk)
                yield chunk
            file.flush()
            os.fsync(file.fileno())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = address(described(written(), layout.num_bytes)).hex()
        if found != agreed:
            raise UsageError(
                f"{folder}: has a base with root {found[:12]}, the manifest names {agreed[:12]}: this is not the "
                "checkpoint that the run begins with"
            )
        partial.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _read(checkpoint: Checkpoint, layout: BaseLayout) -> Iterator[bytes | memoryview]:
    return layout.content(lambda name: checkpoint.read({name: layout.shapes[name]})[name])
