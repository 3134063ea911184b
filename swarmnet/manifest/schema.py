"""What all peers of a run hold equal, field by field. The canonical hash of these fields is the run id.

Knows no file format and no defaults from elsewhere: `manifest.file` reads and writes TOML. Every field has a default
here so that `init` can write it out; a file must name every field (a later release then changes no run id).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Codec = Literal["fp32", "bf16", "int8"]


class Table(BaseModel):
    """A frozen, strict table: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Model(Table):
    """A Llama-style decoder, Hugging Face parameter names."""

    vocab_size: Positive = 256
    hidden_size: Positive = 128
    intermediate_size: Positive = 352
    num_layers: Positive = 6
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 32
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    init_std: Annotated[float, Field(gt=0)] = 0.02
    tie_embeddings: bool = False
    attention_bias: bool = False

    @model_validator(mode="after")
    def _heads(self) -> Model:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even (rotary embedding turns pairs)")
        return self


class Cut(Table):
    """How the layers are cut into stages: balanced by FLOPs ("auto") or the number of layers of each stage."""

    stages: Positive = 3
    layers: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] = "auto"


class Data(Table):
    """The token stream. `source` is a hint where to find it; the digests are what counts."""

    source: str = "stdlib"
    tokenizer: str = "bytes"
    num_tokens: Annotated[int, Field(ge=0)] = 0
    tokens_sha256: str = ""
    tokenizer_sha256: str = ""


class Training(Table):
    """One step is `microbatches` microbatches of `microbatch_size` sequences of `sequence_length` tokens."""

    seed: Annotated[int, Field(ge=0)] = 0
    total_steps: Positive = 60
    microbatches: Positive = 8
    microbatch_size: Positive = 4
    sequence_length: Positive = 64
    eval_every: Annotated[int, Field(ge=0)] = 20
    eval_microbatches: Positive = 2
    max_void: Annotated[int, Field(ge=0)] = 1


class Optimizer(Table):
    """AdamW (arXiv:1711.05101) with linear warm-up and a schedule; decay on matrices only."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    decay_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Fraction = 0.1


class Numerics(Table):
    """deterministic: gradients on a grid of 2^-grid_bits, summed in int64 (exact at any order). fp32: float sums."""

    mode: Literal["deterministic", "fp32"] = "deterministic"
    grid_bits: Annotated[int, Field(ge=8, le=48)] = 32
    resync_every: Annotated[int, Field(ge=0)] = 0


class Wire(Table):
    """Codecs of what crosses a stage boundary."""

    activations: Codec = "fp32"
    gradients: Codec = "fp32"


class Averaging(Table):
    """How replicas of a stage agree. `codec` "int64" belongs to deterministic mode."""

    sync: Literal["exact"] = "exact"
    codec: Literal["int64", "fp32", "bf16", "int8"] = "int64"
    group_size: Positive = 16


class Protocol(Table):
    """Timers of the step protocol, seconds. suspect_s is the floor of the adaptive silence limit."""

    heartbeat_s: Annotated[float, Field(gt=0)] = 0.5
    suspect_s: Annotated[float, Field(gt=0)] = 3.0
    long_silence_s: Annotated[float, Field(gt=0)] = 15.0
    idle_index_s: Annotated[float, Field(gt=0)] = 5.0
    keeper_term_steps: Positive = 16


class Admission(Table):
    """Who may join: anyone ("open"), or holders of an invite signed by `owner` (a peer id)."""

    policy: Literal["open", "invite"] = "open"
    owner: str = ""


class Limits(Table):
    """What a peer accepts from the network before it takes memory."""

    max_payload_mib: Positive = 1024
    max_clock_offset_s: Annotated[float, Field(gt=0)] = 60.0


class Manifest(Table):
    """A run."""

    format: Literal[1] = 1
    name: str = "my-run"
    model: Model = Model()
    cut: Cut = Cut()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    numerics: Numerics = Numerics()
    wire: Wire = Wire()
    averaging: Averaging = Averaging()
    protocol: Protocol = Protocol()
    admission: Admission = Admission()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _together(self) -> Manifest:
        if isinstance(self.cut.layers, tuple):
            if len(self.cut.layers) != self.cut.stages:
                raise ValueError(f"cut.layers names {len(self.cut.layers)} stages, cut.stages = {self.cut.stages}")
            if sum(self.cut.layers) != self.model.num_layers:
                raise ValueError(
                    f"cut.layers sums to {sum(self.cut.layers)}, model.num_layers = {self.model.num_layers}"
                )
        elif self.cut.stages > self.model.num_layers:
            raise ValueError(f"cut.stages = {self.cut.stages} is more than model.num_layers = {self.model.num_layers}")
        if self.model.tie_embeddings and self.cut.stages > 1:
            raise ValueError("model.tie_embeddings = true needs both ends in one stage: untie, or set cut.stages = 1")
        if (self.numerics.mode == "deterministic") != (self.averaging.codec == "int64"):
            raise ValueError('averaging.codec = "int64" and numerics.mode = "deterministic" go together')
        return self
