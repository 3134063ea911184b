"""Write a model where transformers finds it: config, shards of safetensors and their index, what belongs to the text.

Everything is written into a folder next to the target and renamed, so that a half-written model never looks whole.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from swarmnet.errors import UsageError, unwritable
from swarmnet.manifest.schema import Model
from swarmnet.model.huggingface.checkpoint import INDEX, SINGLE
from swarmnet.model.huggingface.config import FILE, config_of, raw_config, sliding

SHARD_BYTES = 4 << 30

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files of a checkpoint that are about text: copied as they are."""

KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
"""What the config of the checkpoint a run began from knows and a manifest does not."""


def write_model(
    target: Path,
    model: Model,
    stages: Iterable[Mapping[str, Tensor]],
    *,
    longest: int,
    like: Path | None = None,
    began: Path | None = None,
    tokenizer: Path | None = None,
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write `model` with the tensors of `stages`, which may come one by one; at most one of them is held in memory.

    Args:
        longest: tokens of a sequence in training.
        like: the checkpoint with the text files to copy.
        began: the checkpoint that the run began with, if it is here; its sliding window comes along.
        tokenizer: a tokenizer.json.
        dtype: of the tensors, as a manifest spells it.

    Returns the names of the files. Raises UsageError: `target` exists, or cannot be written.
    """
    with new_folder(target) as folder:
        kind = {"dtype": "bfloat16"} if dtype == "bf16" else {}
        _json(folder / FILE, _config(model, longest, began) | _kept(like, longest) | kind)
        _shards(folder, stages, shard_bytes)
        for path in [*(like / name for name in TEXT_FILES if like is not None), *([tokenizer] if tokenizer else [])]:
            if path.is_file():
                shutil.copyfile(path, folder / ("tokenizer.json" if path == tokenizer else path.name))
    return sorted(path.name for path in target.iterdir())


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which is `target` when all of it is written. Raises UsageError: that exists, or cannot be
    written."""
    if os.path.lexists(target):
        raise UsageError(f"{target}: exists already; name a directory that does not")
    # On the same file system, or it could not be renamed.
    partial = target.with_name(f".{target.name}.part")
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            _sync(path)  # a quota, or a full disk behind a network, may be noticed only now
        partial.rename(target)  # only now is there anything under the requested name
    except (OSError, SafetensorError, UnicodeError) as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):  # it holds the model
                folder.rmdir()


def brought(like: Path) -> list[str]:
    """What comes along from the checkpoint `like`: names of files, and of fields of its config."""
    fields = raw_config(like) if (like / FILE).is_file() else {}
    files = [name for name in TEXT_FILES if (like / name).is_file()]
    return [*files, *(key for key in KEPT if fields.get(key) is not None)]


def unlike(like: Path, model: Model, *, longest: int, began: Path | None = None) -> str | None:
    """How the checkpoint `like` is another one than `model`; None: as far as its text goes it is alike, or unknown.

    Raises UsageError if its tokenizer is of more ids than the model knows.
    """
    if not (like / FILE).is_file():
        return None
    theirs, ours = raw_config(like), _config(model, longest, began)
    kinds, sizes = ([data.get(key) for data in (theirs, ours)] for key in ("model_type", "vocab_size"))
    # Ids beyond the embedding would crash every user of the model.
    if isinstance(sizes[0], int) and sizes[0] > model.vocab_size and (like / "tokenizer.json").is_file():
        raise UsageError(
            f"{like} is of a model with {sizes[0]:,} token ids, and this one knows {model.vocab_size:,}: "
            "its tokenizer does not fit; name the checkpoint that the run's tokenizer comes from"
        )
    if kinds[0] is not None and kinds[0] != kinds[1]:
        return f"{like} is a {kinds[0]}, and this model a {kinds[1]}"
    if sizes[0] is not None and sizes[0] != sizes[1]:
        return f"{like} is of a model with {sizes[0]} token ids, and this one knows {sizes[1]}"
    return None


def _config(model: Model, longest: int, began: Path | None) -> dict[str, Any]:
    window = {} if began is None or not (began / FILE).is_file() else sliding(raw_config(began), model, longest=longest)
    return config_of(model, longest=longest, window=window)


def _kept(like: Path | None, longest: int) -> dict[str, Any]:
    if like is None or not (like / FILE).is_file():
        return {}
    data = raw_config(like)
    kept = {key: data[key] for key in KEPT if data.get(key) is not None}
    # A model that was trained on longer texts can read longer ones.
    if isinstance(length := kept.get("max_position_embeddings"), int):
        kept["max_position_embeddings"] = max(length, longest)
    return kept


def _shards(folder: Path, stages: Iterable[Mapping[str, Tensor]], shard_bytes: int) -> None:
    """A shard ends with its stage, or when it is full."""
    files: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in itertools.chain.from_iterable(_cut(tensors, shard_bytes) for tensors in stages):
        path = folder / f".part-{len(files)}"
        safetensors.torch.save_file(shard, path, metadata={"format": "pt"})
        shutil.copymode(folder / FILE, path)  # the library makes them unreadable for other users
        files.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:  # transformers wants no index then
        files[0][0].rename(folder / SINGLE)
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / name)
        places |= dict.fromkeys(names, name)
    _json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _cut(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterable[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # a tensor larger than a shard gets one of its own
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    if shard:
        yield shard


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
