"""`config.json` of a Llama, Mistral, Qwen2 or Qwen3 checkpoint as a `Model`, and a `Model` as such a file.

Reading refuses whatever would change the numbers and is not in a `Model`: another activation, biases in the
feed-forward, other scalings of rotary positions, quantised weights. Knows both spellings of rotary positions:
`rope_theta` with `rope_scaling`, and `rope_parameters`. Reads no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Model

FILE = "config.json"

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type -> the class in transformers."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# rope_type -> the fields of its table.
_SCALINGS = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        _ORIGINAL_LENGTH: "rope_original_length",
    },
}

_FORKS = """attention_chunk_size attention_multiplier attn_logit_softcapping clip_qkv dim_model_base
    embedding_multiplier final_logit_softcapping logit_scale logits_scaling mup no_rope_layers no_rope_layer_interval
    n_routed_experts num_experts num_local_experts parallel_residual qk_layernorm query_pre_attn_scalar
    residual_multiplier scale_depth scale_emb use_parallel_residual use_qk_norm"""
_OTHER_FUNCTIONS = frozenset(_FORKS.split())
"""Settings by which forks of these kinds compute something else."""

_READ = """_name_or_path architectures attention_bias auto_map bos_token_id dtype eos_token_id head_dim hidden_act
    hidden_size initializer_range intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias
    model_type num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings pad_token_id
    partial_rotary_factor pretraining_tp quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta
    sliding_window tie_word_embeddings torch_dtype transformers_version unk_token_id use_cache use_sliding_window
    vocab_size"""
_KNOWN = frozenset(_READ.split()) | _OTHER_FUNCTIONS
"""What is read or refused, and what means nothing to weights or ids."""

_LARGEST_BYTES = 4 << 20

_DEFAULT_EPS = 1e-6  # rms_norm_eps in transformers, of all four kinds, where a config has no word of it.

_DEFAULT_WINDOW = 4096  # sliding_window in transformers, where a config has no word of it; null means none.


@dataclass(frozen=True, slots=True)
class Described:
    """What a checkpoint's config says. window: attention reaches back so many tokens only; None: to the beginning.

    unread: its settings that are not applied, as text; none of them changes what its kind computes.
    """

    model: Model
    window: int | None = None
    unread: tuple[str, ...] = ()


def read_config(folder: Path) -> Described:
    """The model in `folder`, `tie_embeddings` as the file has it. Raises UsageError: not there, or not supported."""
    return describe(raw_config(folder), where=str(folder / FILE))


def raw_config(folder: Path) -> dict[str, Any]:
    """The config in `folder` as it stands there. Raises UsageError if it cannot be read."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            data = parsed(file.read(_LARGEST_BYTES))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}; name the directory of a Hugging Face checkpoint"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds no table")
    return data


def parsed(text: bytes) -> Any:
    """JSON in which no key stands twice, because readers differ in which one they take. Raises ValueError."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{json.dumps(key)} stands in it twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=table)


def describe(data: Mapping[str, Any], *, where: str) -> Described:
    """What the config `data` means. Raises UsageError in the name of `where`."""
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UsageError(f"{where}: model_type = {json.dumps(kind)}: supported are {', '.join(ARCHITECTURES)}")
    _refuse(data, where)
    fields: dict[str, Any] = {ours: _need(data, theirs, where) for theirs, ours in _SIZES.items()}
    if kind != "llama":  # the first Llamas had as many of them as query heads
        _need(data, "num_key_value_heads", where)
    fields["num_kv_heads"] = _or(data, "num_key_value_heads", fields["num_heads"])
    # Newer files say it; in older ones it follows.
    if data.get("head_dim") is not None:
        fields["head_dim"] = data["head_dim"]
    elif _is_count(fields["hidden_size"]) and _is_count(fields["num_heads"]) and fields["num_heads"]:
        fields["head_dim"] = fields["hidden_size"] // fields["num_heads"]
    fields["rms_norm_eps"] = _or(data, "rms_norm_eps", _DEFAULT_EPS)
    # Some files have 0 because their weights will not be drawn again.
    fields["init_std"] = _or(data, "initializer_range", Model().init_std) or Model().init_std
    fields["tie_embeddings"] = _or(data, "tie_word_embeddings", False)
    everywhere = _or(data, "attention_bias", False) if kind in ("llama", "qwen3") else False
    fields |= {"attention_bias": kind == "qwen2" or everywhere, "output_bias": everywhere, "qk_norm": kind == "qwen3"}
    fields |= _rotary(data, where)
    try:
        model = Model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        shown = f"{name} = {json.dumps(fields.get(name), default=str)}: " if name else ""
        raise UsageError(f"{where}: {shown}{first['msg'].removeprefix('Value error, ')}") from error
    unread = (f"{key} = {json.dumps(data[key])[:40]}" for key in sorted(data.keys() - _KNOWN) if data[key])
    window = _window(data, kind, where)
    layers = data.get("layer_types") or []
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    if not isinstance(layers, list) or any(each not in allowed for each in layers):
        raise UsageError(f"{where}: layer_types = {json.dumps(layers)[:80]}: supported: {', '.join(allowed)}")
    return Described(model, window, tuple(unread))


def sliding(data: Mapping[str, Any], model: Model, *, longest: int) -> dict[str, Any]:
    """What the config `data` says of a sliding window, for the config of `model`, which began with its weights.

    Inside its window a model computes the same with and without it, so training knows none; longer texts need it.
    Empty if there is no window, if sequences of `longest` tokens reach beyond it, or if `data` is of another model.
    """
    kind = data.get("model_type")
    # A plain model is written as a Llama, and may have come from a Mistral.
    if kind not in (("mistral",) if _is_plain(model) else (_kind(model),)):
        return {}
    if any(data.get(theirs) != getattr(model, ours) for theirs, ours in _SIZES.items()):
        return {}
    window = _window(data, kind, FILE)
    # Trained beyond the window without it: the model is no longer one with a window.
    if window is None or window < longest:
        return {}
    if kind == "mistral":
        return {"model_type": kind, "sliding_window": window}
    layers = {key: data[key] for key in ("max_window_layers", "layer_types") if data.get(key) is not None}
    return {"model_type": kind, "sliding_window": window, "use_sliding_window": True, **layers}


def config_of(model: Model, *, longest: int, window: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `config.json` under which transformers computes what `model` does.

    longest: tokens of a sequence; what the model was trained on. window: what `sliding` has found.
    Raises UsageError if there is none.
    """
    window = window or {}
    kind = window.get("model_type") or _kind(model)
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "dtype": "float32",
        "torch_dtype": "float32",
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": longest,
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling(model),
        "use_cache": True,
    }
    # What a kind does not know is left out, and what it takes for granted is said.
    if kind in ("llama", "qwen3"):
        data["attention_bias"] = model.attention_bias
    data |= {"mlp_bias": False} if kind == "llama" else {"sliding_window": None}
    if kind.startswith("qwen"):
        data["use_sliding_window"] = False
    return {**data, **window}


def _is_plain(model: Model) -> bool:
    """Neither biases nor norms over heads: a Llama, or a Mistral."""
    return not (model.qk_norm or model.attention_bias or model.output_bias)


def _kind(model: Model) -> str:
    """The model_type that computes this. A Llama of transformers' has to divide its width by its heads, whatever the
    width of a head; without biases a Mistral without a window is the same."""
    if model.qk_norm:
        return "qwen3"
    if model.attention_bias and not model.output_bias:
        return "qwen2"
    if model.hidden_size % model.num_heads == 0:
        return "llama"
    if model.attention_bias:
        raise UsageError(
            f"model.hidden_size = {model.hidden_size} is no multiple of model.num_heads = "
            f"{model.num_heads}: with model.output_bias no architecture of transformers takes that"
        )
    return "mistral"


def _scaling(model: Model) -> dict[str, Any] | None:
    if model.rope_scaling == "none":
        return None
    fields = {theirs: getattr(model, ours) for theirs, ours in _SCALINGS[model.rope_scaling].items()}
    return {"rope_type": model.rope_scaling, **fields}


def _rotary(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of rotary positions, whichever way they are written.

    Where a file has both tables, transformers' versions differ in which one they take: so both must mean the same.
    """
    tables = {key: data[key] for key in ("rope_parameters", "rope_scaling") if data.get(key) not in (None, {})}
    found = [_turning(table, data, f"{where}: {key}") for key, table in tables.items()]
    # Either may be the one that transformers takes.
    if len(found) == 2 and found[0] != found[1]:
        differ = sorted(name for name in found[0] | found[1] if found[0].get(name) != found[1].get(name))
        raise UsageError(
            f"{where}: rope_parameters and rope_scaling disagree ({', '.join(differ)}): remove the one that is wrong"
        )
    return found[0] if found else _turning({}, data, where)


def _turning(table: Any, data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that one table of a config means. What it leaves out is said at the top of `data`."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} = {json.dumps(table)}: must be a table")
    for first, second, value, other in (
        ("rope_theta", "rope_theta at the top of the file", table.get("rope_theta"), data.get("rope_theta")),
        ("rope_type", "type", table.get("rope_type"), table.get("type")),
    ):
        if value is not None and other is not None and value != other:
            raise UsageError(
                f"{where}: {first} = {json.dumps(value)}, and {second} = {json.dumps(other)}: "
                "remove the one that is wrong"
            )
    fields: dict[str, Any] = {"rope_theta": _or(table, "rope_theta", _or(data, "rope_theta", 10000.0))}
    kind = _or(table, "rope_type", _or(table, "type", "default"))
    if not isinstance(kind, str) or kind not in ("default", *_SCALINGS):
        raise UsageError(f'{where}: rope_type = {json.dumps(kind)}: supported are "default", "linear" and "llama3"')
    key = _ORIGINAL_LENGTH
    for name in sorted(table.keys() - {"rope_theta", "rope_type", "type", key} - _SCALINGS.get(kind, {}).keys()):
        if table[name] not in (None, 1.0):
            raise UsageError(
                f"{where}: {name} = {json.dumps(table[name])[:80]}: is not supported for {json.dumps(kind)}"
            )
    if kind == "default":
        return fields
    fields["rope_scaling"] = kind
    inside, outside = table.get(key), data.get(key)
    # Some files have it outside of the table, where versions of transformers differ in what they take.
    if kind == "llama3" and inside is not None and outside is not None and inside != outside:
        raise UsageError(
            f"{where}: {key} = {json.dumps(inside)}, and {json.dumps(outside)} at the top of the file: "
            "remove the one that is wrong"
        )
    there = {**table, key: inside if outside is None else outside}
    return fields | {ours: _need(there, theirs, where) for theirs, ours in _SCALINGS[kind].items()}


def _refuse(data: Mapping[str, Any], where: str) -> None:
    """Raise for what would change the numbers and cannot be in a `Model`."""
    if (activation := data.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UsageError(f'{where}: hidden_act = {json.dumps(activation)}: supported is "silu"')
    for key, plain, words in (
        ("mlp_bias", False, "biases in the feed-forward are not supported"),
        ("quantization_config", None, "quantised weights are not supported: take the checkpoint it was made from"),
        ("partial_rotary_factor", 1.0, "rotary positions of a part of each head are not supported"),
    ):
        if data.get(key) not in (None, plain):
            raise UsageError(f"{where}: {key} = {json.dumps(data[key])[:80]}: {words}")
    for key in sorted(_OTHER_FUNCTIONS & data.keys()):
        # 1 scales nothing, and one expert is none; 0, false and null are how a setting is turned off.
        if data[key] is True or (data[key] and data[key] != 1):
            raise UsageError(
                f"{where}: {key} = {json.dumps(data[key])[:80]}: not supported, the model computes otherwise"
            )
    code = data.get("auto_map")
    if isinstance(code, dict) and any(str(name).startswith("AutoModel") for name in code):
        raise UsageError(f"{where}: auto_map names code of the checkpoint's own for the model, which is not run here")


def _window(data: Mapping[str, Any], kind: str, where: str) -> int | None:
    """How far attention reaches back, where that has a limit in any layer."""
    # a Mistral has a window unless it says null, a Qwen only if it says so
    used = kind == "mistral" or (kind in ("qwen2", "qwen3") and data.get("use_sliding_window") is True)
    window = data.get("sliding_window", _DEFAULT_WINDOW)
    if not used or window is None:
        return None
    if not _is_count(window) or window < 1:
        raise UsageError(f"{where}: sliding_window = {json.dumps(window)}: must be a number of tokens")
    return int(window)


def _need(data: Mapping[str, Any], key: str, where: str) -> Any:
    if data.get(key) is None:
        raise UsageError(f"{where}: {key} is missing")
    return data[key]


def _or(data: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    return otherwise if data.get(key) is None else data[key]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
