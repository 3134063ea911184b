"""`config.json` in both spellings, and what is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Model
from swarmnet.model.huggingface.config import config_of, describe, read_config, sliding

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def model(**changes: Any) -> Model:
    return describe(LLAMA | changes, where="config.json").model


def test_the_plain_one() -> None:
    assert model() == Model(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=5e5,
        rms_norm_eps=1e-6,
    )


def test_both_spellings_of_rotary_positions_are_one() -> None:
    old = model(rope_scaling=LLAMA3)
    new = model(rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    assert old == new and (old.rope_scaling, old.rope_factor, old.rope_original_length) == ("llama3", 8.0, 8192)
    assert model(rope_scaling={"type": "linear", "factor": 2.0}).rope_factor == 2.0
    assert model(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def test_two_tables_that_say_the_same_are_one() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    assert model(rope_parameters=linear, rope_scaling=linear) == model(rope_scaling=linear)
    assert model(rope_parameters={}, rope_scaling=linear) == model(rope_scaling=linear)
    assert model(rope_parameters={"rope_theta": 5e5}, rope_scaling={"type": "default"}) == model()
    short = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    beside = {"original_max_position_embeddings": 8192}
    assert model(rope_scaling=short, **beside) == model(rope_scaling=LLAMA3, **beside) == model(rope_scaling=LLAMA3)


def test_what_is_not_said() -> None:
    unsaid = ("num_key_value_heads", "rope_theta", "rms_norm_eps")
    found = describe({key: value for key, value in LLAMA.items() if key not in unsaid}, where="").model
    assert (found.num_kv_heads, found.rope_theta, found.tie_embeddings) == (4, 10000.0, False)
    assert found.rms_norm_eps == 1e-6


def test_biases_and_norms_follow_the_kind() -> None:
    def kind(**changes: Any) -> tuple[bool, bool, bool]:
        found = model(**changes)
        return found.attention_bias, found.output_bias, found.qk_norm

    assert kind() == (False, False, False)
    assert kind(attention_bias=True) == (True, True, False)
    assert kind(model_type="mistral") == (False, False, False)
    assert kind(model_type="qwen2") == (True, False, False)
    assert kind(model_type="qwen3") == (False, False, True)
    assert kind(model_type="qwen3", attention_bias=True) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),  # what transformers takes then
        ({"model_type": "qwen3", "use_sliding_window": True}, 4096),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096),
        ({"sliding_window": 4096}, None),
    ],
)
def test_windows(changes: dict[str, Any], window: int | None) -> None:
    assert describe(LLAMA | changes, where="").window == window


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"attention_bias": True, "output_bias": True},
        {"qk_norm": True},
        {"qk_norm": True, "attention_bias": True, "output_bias": True},
        {"tie_embeddings": True},
        {"rope_scaling": "linear", "rope_factor": 2.0},
        {"rope_scaling": "llama3", "rope_factor": 8.0},
        {"num_heads": 3, "num_kv_heads": 1},
        {"num_heads": 3, "num_kv_heads": 1, "qk_norm": True},
    ],
    ids=str,
)
def test_what_is_written_reads_back_equal(changes: dict[str, Any]) -> None:
    written = Model.model_validate(changes)
    assert describe(config_of(written, longest=64), where="").model == written


def test_a_window_is_written_for_the_model_that_began_with_it() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    ours = describe(mistral, where="").model
    found = sliding(mistral, ours, longest=64)
    assert found == {"model_type": "mistral", "sliding_window": 4096}
    written = config_of(ours, longest=64, window=found)
    assert written["architectures"] == ["MistralForCausalLM"] and describe(written, where="").window == 4096
    assert not sliding(mistral, ours, longest=5000)  # it was trained beyond it
    assert not sliding(mistral | {"sliding_window": None}, ours, longest=64)
    assert not sliding(mistral | {"num_hidden_layers": 3}, ours, longest=64)
    assert not sliding(LLAMA | {"sliding_window": 4096}, ours, longest=64)
    qwen = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    assert not sliding(qwen, ours, longest=64)
    assert sliding(qwen, describe(qwen, where="").model, longest=64) == {
        "model_type": "qwen2",
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_window_layers": 1,
    }


def test_what_transformers_has_no_name_for() -> None:
    odd = Model(num_heads=3, num_kv_heads=1, attention_bias=True, output_bias=True)
    with pytest.raises(UsageError, match="no multiple of"):
        config_of(odd, longest=64)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"rope_theta": 1.0, "a": 1, "rope_theta": 2.0}')
    with pytest.raises(UsageError, match='"rope_theta" stands in it twice'):
        read_config(tmp_path)
    for text, words in (("{", "is not JSON"), ("[]", "holds no table"), ("[" * 50000, "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=words):
            read_config(tmp_path)


def test_what_changes_nothing_is_read_past_and_other_settings_are_named() -> None:
    off = {"logit_scale": 1, "attn_logit_softcapping": None, "num_experts": 0, "torch_dtype": "bfloat16"}
    assert describe(LLAMA | off, where="") == describe(LLAMA, where="")
    named = describe(LLAMA | {"attention_dropout": 0.1, "made_by": "us", "use_bias": False}, where="").unread
    assert named == ("attention_dropout = 0.1", 'made_by = "us"')
