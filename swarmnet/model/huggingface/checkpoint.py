"""Tensors of a checkpoint in safetensors, one file or several with an index: each stage reads its own and no others.

`Checkpoint` looks at headers only until tensors are asked for. What is read is checked: shapes before contents, every
number finite. Whatever their type in the file, tensors are fp32 here.

Where a model is tied in its files and not here, the head is a copy of the embedding: so it is in every run of more than
one stage. `check_head` refuses files with another head than their config says. Which tensors a stage needs
follows from the decoder, which uses Hugging Face's names.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Cut, Model
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.huggingface.config import parsed

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_LARGEST_INDEX = 64 << 20
_UNUSED = "rotary_emb.inv_freq"  # old files hold them; they follow from the config

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")

Shapes = Mapping[str, torch.Size]


def stage_shapes(model: Model, cut: Cut, sequence_length: int) -> list[dict[str, torch.Size]]:
    """Names and shapes of each stage's parameters, in canonical order; no memory is taken for them."""
    ranges = cut_layers(model, cut, sequence_length)
    with torch.device("meta"):
        modules = [
            StageModule(model, layers, first=stage == 0, last=stage == len(ranges) - 1)
            for stage, layers in enumerate(ranges)
        ]
    return [{name: parameter.shape for name, parameter in module.named_parameters()} for module in modules]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, its header read. Raises UsageError for whatever cannot be read."""
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as content:
            yield content
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeError as error:
        raise UsageError(f"{str(path)!r}: is no name of a file: {error}") from error
    except SafetensorError as error:
        raise UsageError(f"{path}: is not safetensors ({error}): if it was fetched, fetch it again") from error


def tensor_in(content: Any, path: Path, name: str, shape: torch.Size) -> Tensor:
    """One tensor of what is `opened` at `path`: fp32, contiguous. Raises UsageError unless it is finite and fits."""
    try:
        piece = content.get_slice(name)
        # From the header: nothing large is read before it is known to fit.
        if tuple(piece.get_shape()) != tuple(shape):
            raise UsageError(f"{path}: {name} has shape {tuple(piece.get_shape())}, the model {tuple(shape)}")
        tensor: Tensor = content.get_tensor(name)
    except SafetensorError as error:
        raise UsageError(f"{path}: {name} cannot be read: {error}") from error
    if tensor.dtype not in _TYPES:  # eight bits and fewer mean something only with scales that we do not read
        raise UsageError(f"{path}: {name} is of type {tensor.dtype}: quantised weights are not supported")
    tensor = tensor.to(torch.float32)  # what is computed with, whatever the file holds
    if not bool(torch.isfinite(tensor).all()):
        raise UsageError(f"{path}: {name} holds NaN or infinity")
    return tensor.contiguous()


class Checkpoint:
    """The tensors in `folder`. Raises UsageError if there are none, or their index is not one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = self._index()

    @property
    def names(self) -> frozenset[str]:
        """Every tensor that means something."""
        return frozenset(name for name in self._file_of if not name.endswith(_UNUSED))

    def read(self, shapes: Shapes) -> dict[str, Tensor]:
        """These tensors: fp32, on the CPU, in the order of `shapes`. Raises UsageError naming the first that is not
        there, not of that shape, or not finite."""
        found: dict[str, Tensor] = {}
        for file, names in self._by_file(shapes).items():
            path = self.folder / file
            with opened(path) as content:
                for name in names:
                    found[name] = tensor_in(content, path, self._source(name), shapes[name])
        return {name: found[name] for name in shapes}

    def check_head(self, shapes: Shapes, *, may_lack: bool, may_differ: bool) -> None:
        """Raises UsageError if it is not clear what the head is.

        Args:
            shapes: of the first stage's parameters.
            may_lack: the files may hold no head, as it is the embedding.
            may_differ: the head in the files may be another matrix than the embedding.
        """
        if HEAD not in self._file_of:
            if not may_lack:
                raise UsageError(
                    f"{self.folder}: holds no tensor {HEAD}, and its config.json does not say that the head is the "
                    "embedding: if it is, set tie_word_embeddings to true there"
                )
            return
        if may_differ or EMBEDDING not in self._file_of:
            return
        # both are here although the config calls them one: the number of stages must not decide which is trained
        embedding, head = (self.read({name: shapes[EMBEDDING]})[name] for name in (EMBEDDING, HEAD))
        if not torch.equal(embedding, head):
            raise UsageError(
                f"{self.folder}: the head is said to be the embedding, and {HEAD} is another matrix: "
                "--set model.tie_embeddings=false takes it as the head"
            )

    def beyond(self, stages: Sequence[Shapes]) -> list[str]:
        """Tensors here that none of `stages` reads: then the config does not say all of the model."""
        read = {self._source(name) for shapes in stages for name in shapes}
        return sorted(self.names - read - {HEAD if EMBEDDING in read else EMBEDDING})

    def _source(self, name: str) -> str:
        """The name of a parameter in these files: a tied head is the embedding."""
        return EMBEDDING if name == HEAD and HEAD not in self._file_of else name

    def _by_file(self, shapes: Shapes) -> dict[str, list[str]]:
        files: dict[str, list[str]] = {}
        for name in shapes:
            if self._source(name) not in self._file_of:
                raise UsageError(f"{self.folder}: holds no tensor {name}, which the config asks for")
            files.setdefault(self._file_of[self._source(name)], []).append(name)
        return files

    def check_sources(self) -> None:
        """Raises UsageError if the files hold a tensor twice, or say differently what the weights are.

        Reads the headers of all files; tensors only where one whole file and an index are both here.
        """
        index, single = self.folder / INDEX, self.folder / SINGLE
        if not index.is_file():
            return
        named, held = self._indexed(), dict[str, str]()
        if single.is_file() and any(not (self.folder / file).exists() for file in named.values()):
            raise UsageError(f"{single} is next to {index}, which names missing files: remove the one that is wrong")
        for file in sorted(set(named.values())):
            with opened(self.folder / file) as content:
                for name in list(content.keys()):
                    # Which of them is taken depends on the reader.
                    if name in held:
                        raise UsageError(
                            f"{self.folder}: {held[name]} and {file} both hold {name}: remove the one that is wrong"
                        )
                    held[name] = file
        for name in sorted(named.keys() | held.keys()):
            if named.get(name) != held.get(name):
                where = (f"in {found[name]}" if name in found else "nowhere" for found in (held, named))
                raise UsageError("{}: {} is {}, and by the index {}: fetch the files again".format(index, name, *where))
        if single.is_file() and (name := self._differs(held)) is not None:
            raise UsageError(
                f"{single} and {index} are both here with different weights ({name}): remove the one that is wrong"
            )

    def unread(self) -> list[str]:
        """Files here that look like weights and are not read."""
        read = {SINGLE} if (self.folder / SINGLE).is_file() else set(self._file_of.values())
        return sorted(path.name for path in self.folder.iterdir() if path.suffix in _WEIGHTS and path.name not in read)

    def _differs(self, other: Mapping[str, str]) -> str | None:
        """The first tensor that is another one in those files than here, None if there is none."""
        if strange := sorted(self._file_of.keys() ^ other.keys()):
            return strange[0]
        with opened(self.folder / SINGLE) as whole:
            for name, file in sorted(other.items(), key=lambda item: (item[1], item[0])):
                with opened(self.folder / file) as part:
                    shape, theirs = (torch.Size(each.get_slice(name).get_shape()) for each in (whole, part))
                    if shape != theirs or not torch.equal(
                        tensor_in(whole, self.folder / SINGLE, name, shape),
                        tensor_in(part, self.folder / file, name, shape),
                    ):
                        return name
        return None

    def _index(self) -> dict[str, str]:
        """name -> file that holds it; as transformers does, one whole file before an index."""
        if (self.folder / SINGLE).is_file():
            with opened(self.folder / SINGLE) as content:
                return dict.fromkeys(content.keys(), SINGLE)
        if (self.folder / INDEX).is_file():
            return self._indexed()
        raise UsageError(f"{self.folder}: holds neither {SINGLE} nor {INDEX}; other formats (.bin, .pth) are not read")

    def _indexed(self) -> dict[str, str]:
        """What the index says."""
        path = self.folder / INDEX
        try:
            with path.open("rb") as file:
                found = parsed(file.read(_LARGEST_INDEX))["weight_map"]
            files = {str(name): str(place) for name, place in found.items()}
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}: is not an index of tensors ({error})") from error
        for place in files.values():
            # A path out of the folder could read any file of this machine.
            if Path(place).name != place or place in ("", ".", ".."):
                raise UsageError(f"{path}: names {place!r}, which is no file of its folder")
        return files


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and fp32 bytes, in the order given: equal for equal weights, whatever their layout."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(f"{name} {list(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().numpy().data.cast("B"))
    return total.hexdigest()


def stage_weights(folder: Path, shapes: Shapes, *, stage: int, agreed: str) -> dict[str, Tensor]:
    """What `stage` begins with, by name: fp32, on the CPU. Reads no other stage's tensors.

    agreed: their digest in the manifest. It says which weights the run begins with, whatever their source; the folder
    is a hint and may be wrong. Raises UsageError: not in `folder`, or not these weights.
    """
    tensors = Checkpoint(folder).read(shapes)
    # From any source the weights must be those of the run.
    if (found := digest(tensors)) != agreed:
        raise UsageError(
            f"{folder}: the weights of stage {stage} have digest {found[:12]} here, {agreed[:12]} in the "
            "manifest: this is not the checkpoint the run begins with, or the run is cut elsewhere"
        )
    return tensors


def checked(folder: Path, stages: Sequence[Shapes], *, may_lack_head: bool, may_differ_head: bool) -> Checkpoint:
    """The checkpoint in `folder`, which is all that a model of these stages is made of.

    may_lack_head, may_differ_head: as of `Checkpoint.check_head`.
    Raises UsageError: tensors are missing, do not fit the model, or the model leaves some unread.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.check_sources()
    checkpoint.check_head(stages[0], may_lack=may_lack_head, may_differ=may_differ_head)
    # Unread weights mean that the config does not describe all of the model.
    if strange := checkpoint.beyond(stages):
        raise UsageError(
            f"{folder}: holds tensors that the model has no use for ({', '.join(strange[:3])}"
            f"{', ...' if len(strange) > 3 else ''}): it is not of the kind its config.json says"
        )
    return checkpoint
