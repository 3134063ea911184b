"""What all peers of a run hold equal, field by field. The canonical hash of these fields is the run id.

Knows no file: `manifest.file` reads and writes TOML. `init` writes every field; a file that leaves a field out means
the default of its `format`, which never changes (`FORMATS`).
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from swarmnet.config.plug_in import is_plug_in, one_of
from swarmnet.config.table import CliOption, Count, Positive, Seconds, Table, says
from swarmnet.manifest.codec_names import INTEGERS, LOCAL, check_averaging, check_boundary
from swarmnet.manifest.timers import Timers


def _visible(text: str) -> str:
    """Raises ValueError for an invisible character: two manifests that look equal would be two runs."""
    for at, char in enumerate(text):
        # Persian and emoji join with these; between ASCII characters they do nothing.
        joins = char in "\u200c\u200d" and not text[max(at - 1, 0) : at].isascii()
        if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") and not joins:
            raise ValueError(f"holds the invisible character U+{ord(char):04X}: write it without")
    return text


Visible = Annotated[str, AfterValidator(_visible)]
Above0 = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Digest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
FullDigest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
OwnerKey = Annotated[str, Field(pattern="^(12D3Koo[1-9A-HJ-NP-Za-km-z]{45})?$")]
BoundaryCodec = Annotated[str, AfterValidator(check_boundary)]
SlowCodec = Annotated[str, AfterValidator(lambda name: name and check_boundary(name))]
SumCodec = Annotated[str, AfterValidator(check_averaging)]

REDUCERS = ("sum", "norm_clip", "centered_clip")
Reducer = Annotated[str, AfterValidator(lambda name: one_of(name, REDUCERS))]

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer, by the last module in their Hugging Face names."""

NF4_BLOCK = 64
"""Consecutive numbers of a row that have one scale, where a matrix rests in 4 bits (`model.nf4`)."""

AdaptedMatrix = Annotated[str, AfterValidator(lambda name: one_of(name, LINEAR))]
Base = Literal["fp32", "bf16", "nf4"]

UpdateRule = Annotated[str, AfterValidator(lambda name: one_of(name, ("adamw",)))]

FORMATS: Mapping[int, Mapping[str, Any]] = {1: {}}
"""Format of a manifest -> the defaults in it that differ from the schema's, which are those of the newest format.

A default of a format never changes, because a file that leaves the field out would become another run. To change one,
add a format here, and the old default to the earlier formats. A new field may be added to a format, if its default
there means what versions without the field do.
"""


OPTIONAL = frozenset(["lora"])
"""Tables that are not in a file, nor in what is hashed, unless they say something: versions that do not know them take
part in all other runs."""

REMOVED: Mapping[str, str] = {
    "protocol.heartbeat_s": "a heartbeat is sent every sixth of protocol.suspect_s",
    "protocol.idle_index_s": "a microbatch that no peer sends is executed after a third of protocol.long_silence_s",
    "protocol.keeper_term_steps": "a term has 16 steps",
}
"""Fields that manifests of earlier versions have, and what holds instead."""


def _known_format(number: int) -> int:
    if number not in FORMATS:
        raise ValueError(
            f"this version of swarmnet reads format {', '.join(map(str, FORMATS))}: upgrade it (docs/upgrading.md)"
        )
    return number


class Model(Table):
    """A Llama-style decoder, Hugging Face parameter names."""

    vocab_size: Positive = says(256, "token ids are below this")
    hidden_size: Positive = says(128, "width of the residual stream")
    intermediate_size: Positive = says(352, "width inside the SwiGLU feed-forward")
    num_layers: Positive = says(6, "decoder blocks", le=10_000)
    num_heads: Positive = says(4, "query heads; a multiple of num_kv_heads")
    num_kv_heads: Positive = says(2, "key and value heads (grouped-query attention)")
    head_dim: Positive = says(32, "width of one head; even")
    rope_theta: Above0 = says(10000.0, "base of the rotary position embedding")
    rope_scaling: Literal["none", "linear", "llama3"] = says(
        "none", '"none", "linear" (slower by rope_factor), or "llama3" (only slow pairs are)'
    )
    rope_factor: Annotated[float, Field(ge=1.0)] = says(
        1.0, "by how much rotation is slowed down; 1 without rope_scaling"
    )
    rope_low_freq_factor: Above0 = says(
        1.0, '"llama3": pairs with fewer turns in rope_original_length are slowed down whole'
    )
    rope_high_freq_factor: Above0 = says(4.0, '"llama3": pairs with more turns in it are kept')
    rope_original_length: Positive = says(8192, '"llama3": tokens of a sequence before scaling')
    rms_norm_eps: Above0 = says(1e-5, "added to the mean square in every norm")
    init_std: Above0 = says(0.02, "standard deviation of the initial weights")
    tie_embeddings: bool = says(False, "head = embedding; only with cut.stages = 1")
    attention_bias: bool = says(False, "biases in the query, key and value projections")
    output_bias: bool = says(False, "a bias in the attention's output projection too")
    qk_norm: bool = says(False, "a norm over each query and key head, as in Qwen3")

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        attention += self.hidden_size * self.output_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2) + self.hidden_size
        return self.num_layers * layer + ends

    @model_validator(mode="after")
    def _biases(self) -> Model:
        if self.output_bias and not self.attention_bias:
            raise ValueError("output_bias = true without attention_bias = true is no architecture of Hugging Face's")
        if self.qk_norm and self.attention_bias and not self.output_bias:
            raise ValueError("qk_norm = true with attention_bias = true needs output_bias = true, as in Qwen3")
        return self

    @model_validator(mode="after")
    def _rotary(self) -> Model:
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise ValueError(f"rope_factor = {self.rope_factor} has no effect without rope_scaling: leave it at 1.0")
        if self.rope_scaling == "llama3" and self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"rope_low_freq_factor = {self.rope_low_freq_factor} must be below "
                f"rope_high_freq_factor = {self.rope_high_freq_factor}"
            )
        return self

    @model_validator(mode="after")
    def _heads(self) -> Model:
        # Each key head serves equally many query heads.
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even (rotary embedding turns pairs)")
        return self


class Lora(Table):
    """Fine-tuning with adapters of low rank (LoRA, arXiv:2106.09685), in the words of PEFT: the weights that the run
    begins with are frozen, and the adapters alone are trained, averaged and kept. Without dropout, and without biases.
    """

    r: Annotated[int, Field(ge=0, le=1024)] = says(0, "rank of the adapters; 0: none, all weights are trained")
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = says(16.0, "an adapter counts lora_alpha / r times")
    target_modules: Literal["all-linear"] | tuple[AdaptedMatrix, ...] = says(
        "all-linear", f'matrices with an adapter: "all-linear", or some of {", ".join(LINEAR)}'
    )
    use_rslora: bool = says(False, "an adapter counts lora_alpha / sqrt(r) times (arXiv:2312.03732)")
    base: Annotated[Base, CliOption()] = says(
        "fp32", 'how frozen weights rest: "fp32", "bf16", or "nf4": 4 bits for most (QLoRA, arXiv:2305.14314)'
    )

    @property
    def scaling(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def num_parameters(self, model: Model) -> int:
        """Of the adapters of a whole model; without any, of the model."""
        if not self.r:
            return model.num_parameters
        width, inner = model.hidden_size, model.intermediate_size
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        sizes = (width, queries), (width, keys), (width, keys), (queries, width), *((width, inner),) * 3
        each = {name: sum(size) for name, size in zip(LINEAR, sizes, strict=True)}
        targets = LINEAR if self.target_modules == "all-linear" else set(self.target_modules)
        return model.num_layers * self.r * sum(each[name] for name in targets)

    @model_validator(mode="after")
    def _every_field_has_effect(self) -> Lora:
        for name in () if self.r else ("lora_alpha", "target_modules", "use_rslora", "base"):
            default = type(self).model_fields[name].default
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} has no effect without adapters: leave it at its default, {json.dumps(default)}, or choose "
                    "their rank, such as --lora r=16"
                )
        if len(set(self.target_modules)) < len(self.target_modules) and self.target_modules != "all-linear":
            raise ValueError("target_modules names a matrix twice")
        if not self.target_modules:
            raise ValueError(f'target_modules names no matrix: write "all-linear", or some of {", ".join(LINEAR)}')
        return self


class Cut(Table):
    """How the layers are cut into stages: balanced by FLOPs ("auto") or the number of layers of each stage."""

    stages: Annotated[Positive, CliOption("N")] = says(3, "stages the model is cut into")
    layers: Literal["auto"] | tuple[Count, ...] = says(
        "auto", '"auto": balanced by FLOPs, head included; or layers per stage, such as [3, 2, 1]'
    )


class Initial(Table):
    """Weights of version 0: drawn from training.seed, or those of a Hugging Face checkpoint, which `swarmnet init
    --from` names. `source` is a hint where to find it; the digests are what counts.
    """

    source: Visible = says("", 'directory of a checkpoint; "": the weights are drawn from the seed')
    sha256: tuple[FullDigest, ...] = says((), "digest of each stage's weights; filled in by `swarmnet init --from`")

    @model_validator(mode="after")
    def _either(self) -> Initial:
        # Digests without a source, or the other way round, come from editing by hand.
        if bool(self.source) != bool(self.sha256):
            raise ValueError("source and sha256 go together: let `swarmnet init --from DIR` write them")
        return self


class Data(Table):
    """The token stream. `source` is a hint where to find it; the digests are what counts."""

    source: Annotated[Visible, CliOption("SOURCE", name="data")] = says(
        "stdlib",
        'text, .jsonl, .parquet or .arrow (PATH#COLUMN: not "text"), a folder of them, tokens (.bin, .npy), "stdlib": '
        'Python\'s source, or "corpus:small"',
    )
    tokenizer: Annotated[Visible, CliOption("NAME", default="that of --from, else bytes")] = says(
        "bytes", '"bytes", a tokenizer.json, or "ids" for a file of token ids'
    )
    num_tokens: Count = says(0, "length of the token stream; filled in by `swarmnet init`")
    tokens_sha256: Digest = says("", "digest of the token stream; filled in by `swarmnet init`")
    tokens_root: Digest = says("", "root of the tree of training windows; filled in by `swarmnet init`")
    tokenizer_sha256: Digest = says("", "digest of the tokenizer; filled in by `swarmnet init`")


class Training(Table):
    """One step is `microbatches` microbatches of `microbatch_size` sequences of `sequence_length` tokens."""

    seed: Annotated[Count, CliOption("N")] = says(0, "of the initial weights and of the order of the data")
    total_steps: Annotated[Positive, CliOption("N", name="steps")] = says(60, "optimizer steps of the run")
    microbatches: Annotated[int, Field(ge=1, le=16384)] = says(8, "per step, over the whole swarm; at most 16384")
    microbatch_size: Positive = says(4, "sequences per microbatch")
    sequence_length: Positive = says(64, "tokens per sequence")
    eval_every: Count = says(20, "steps between held-out evaluations; 0: never")
    eval_microbatches: Positive = says(2, "microbatches of one evaluation")
    checkpoint_every: Count = says(50, "steps between checkpoints on the peers' disks; 0: only at the end")
    allow_drop: bool = says(False, "a stage that lost its newest state goes on from an older one, alone")
    max_discarded: Count = says(0, "non-finite microbatches tolerated in one step; more stop the run")

    @property
    def total_tokens(self) -> int:
        """What the whole run reads."""
        return self.total_steps * self.microbatches * self.microbatch_size * self.sequence_length

    @model_validator(mode="after")
    def _something_counts(self) -> Training:
        # A step without any gradient would divide by zero tokens.
        if self.max_discarded >= self.microbatches:
            raise ValueError(f"max_discarded = {self.max_discarded} must be below microbatches = {self.microbatches}")
        return self


class Optimizer(Table):
    """AdamW (arXiv:1711.05101) with linear warm-up and a schedule; decay on matrices only."""

    name: UpdateRule = says("adamw", '"adamw", or a plug-in\'s (docs/extending.md)')
    learning_rate: Above0 = says(2e-3, "at the peak, after warm-up")
    beta1: Decay = says(0.9, "decay of the first moment")
    beta2: Decay = says(0.95, "decay of the second moment")
    lead: Annotated[float, Field(ge=0.0, le=20.0)] = says(
        0.0, 'steps by which the first moment is carried on; with averaging.sync = "overlap" 2.5'
    )
    eps: Above0 = says(1e-8, "added to the root of the second moment")
    state: Literal["fp32", "8bit"] = says("fp32", 'moments: "fp32", or "8bit": a quarter of the memory (docs/plan.md)')
    weight_decay: Annotated[float, Field(ge=0)] = says(0.1, "decoupled, matrices only")
    clip_norm: Above0 = says(1.0, "largest L2 norm of the average gradient, over all stages")
    warmup_steps: Count = says(30, "linear: step t = 0, 1, ... has (t + 1) / warmup_steps of the peak")
    schedule: Literal["constant", "cosine", "wsd"] = says(
        "cosine", '"constant", "cosine", or "wsd" (warm-up, stable, decay)'
    )
    decay_steps: Count = says(0, '"wsd": length of the final decay')
    min_lr_ratio: Fraction = says(0.1, "learning rate at the end, as a fraction of the peak")

    @model_validator(mode="after")
    def _moving(self) -> Optimizer:
        # Without decay the first moment is the gradient itself.
        if self.lead and not self.beta1:
            raise ValueError(f"lead = {self.lead} carries on a first moment that beta1 = 0 does not keep: set lead = 0")
        if self.name != "adamw" and (self.lead or self.state != "fp32"):
            raise ValueError(
                f'name = "{self.name}" goes with lead = 0.0 and state = "fp32": other values are made for AdamW'
            )
        return self


class Numerics(Table):
    """Which kernels compute gradients, and what is aggregated; docs/numerics.md has the table of modes.

    compute: of a microbatch; weights and aggregates do not depend on it.
    """

    mode: Literal["deterministic", "fast", "fp32"] = says(
        "deterministic",
        '"deterministic": the bits of one process; "fast": integer aggregates too, of any kernels; "fp32": with '
        'averaging.sync = "local"',
    )
    grid_bits: Annotated[int, Field(ge=8, le=48)] = says(
        32, "integer aggregates: gradients are rounded to multiples of 2^-grid_bits"
    )
    compute: Literal["fp32", "bf16"] = says(
        "fp32", 'operands of matrix products: "fp32", or "bf16": faster, half the activations'
    )

    @property
    def deterministic(self) -> bool:
        """Does the same microbatch on the same weights give the same bits again on one machine?"""
        return self.mode == "deterministic"

    @property
    def integers(self) -> bool:
        """Are gradients rounded to integers before they are summed? Else an accumulator is fp32."""
        return self.mode != "fp32"


class Wire(Table):
    """Codecs of what crosses a stage boundary."""

    activations: BoundaryCodec = says("fp32", '"fp32", "bf16", "int8", ... (see docs/averaging.md): what goes forward')
    gradients: BoundaryCodec = says("fp32", '"fp32", "bf16", "int8", ...: what comes back')
    slow: SlowCodec = says("", 'both, on lines below slow_mbit; only with averaging.sync = "local"; "": no other')
    slow_mbit: Annotated[float, Field(ge=0, le=1e6)] = says(0.0, "Mbit/s below which a line is slow; 0 without `slow`")

    @model_validator(mode="after")
    def _slow_lines(self) -> Wire:
        if bool(self.slow) != bool(self.slow_mbit):
            raise ValueError(
                f'slow = "{self.slow}" and slow_mbit = {self.slow_mbit} go together: a codec, and the Mbit/s '
                "below which a line has it"
            )
        if self.slow and self.slow == self.activations == self.gradients:
            raise ValueError(f'slow = "{self.slow}" is what crosses every line: leave it empty, and slow_mbit 0.0')
        return self

    @property
    def codecs(self) -> tuple[str, ...]:
        """All that may cross a boundary."""
        return tuple(filter(None, (self.activations, self.gradients, self.slow)))

    def is_slow(self, bytes_per_s: float) -> bool:
        """Is a link of this bandwidth slow in this run? An unmeasured one, 0, is not."""
        return 0 < bytes_per_s * 8e-6 < self.slow_mbit


@dataclass(frozen=True, slots=True)
class Delay:
    """On which version's weights each step is computed: how late its gradient may be.

    With `sync = "overlap"` it is one version earlier, but for the first `overlap_after` steps: while weights change
    fastest, late gradients do the most harm (arXiv:2101.06840 delays after 40 steps, too).
    """

    most: int = 0
    """How many versions late at the most, 0 or 1."""
    since: int = 0
    """The first step that is late."""

    def behind(self, step: int) -> int:
        """Step `step` is computed on the weights of version step - behind (of version 0 at the least)."""
        return self.most if step >= self.since else 0

    def ahead(self, version: int) -> int:
        """At `version` the steps version .. version + ahead are open; the last of them is computed on its weights."""
        return self.behind(version + 1)


NO_DELAY = Delay()
"""Every step on the weights that the one before has led to."""


# Fields of `Averaging` that have an effect with one value of another field; with any other they keep their default.
_BELONGS = {
    "overlap_after": ("sync", "overlap"),
    **dict.fromkeys(
        ("partners", "inner_steps", "fragments", "outer_warmup_steps", "outer_learning_rate", "outer_momentum"),
        ("sync", "local"),
    ),
    "norm_factor": ("reducer", "norm_clip"),
    "clip_radius": ("reducer", "centered_clip"),
    "clip_iterations": ("reducer", "centered_clip"),
}


class Averaging(Table):
    """How replicas of a stage agree (docs/numerics.md, docs/local-sync.md)."""

    sync: Annotated[Literal["exact", "overlap", "local"], CliOption()] = says(
        "exact",
        'how replicas of a stage agree: "exact": in each step; "overlap": a step is averaged while the '
        'next computes; "local": each trains on its own, with an outer step now and then',
    )
    overlap_after: Count = says(40, '"overlap": after so many steps one by one; `init` writes 300')
    codec: SumCodec = says("int64", '"small" or "int64"; with sync = "local" "int8", "nf4", ...; see docs/averaging.md')
    group_size: Annotated[int, Field(ge=2, le=1024)] = says(
        16, "replicas that average in one group; more stand in a grid of groups"
    )
    reducer: Reducer = says("sum", '"sum"; with sync = "local" also "norm_clip", "centered_clip", ...')
    norm_factor: Above0 = says(2.0, '"norm_clip": the longest gradient, in median lengths')
    clip_radius: Above0 = says(1.0, '"centered_clip": the strongest pull, in median distances')
    clip_iterations: Annotated[int, Field(ge=1, le=100)] = says(
        5, '"centered_clip": steps from the last mean towards the new one'
    )
    drift_every: Count = says(100, "steps between looks at whether replicas hold equal weights; 0: never")
    resync_every: Count = says(100, "steps after which replicas that round otherwise take the leader's state; 0: never")
    partners: Literal["all", "pairs", "groups"] = says(
        "all", '"local": outer steps average "all" (DiLoCo), "pairs" (NoLoCo) or "groups"'
    )
    inner_steps: Positive = says(20, '"local": steps from one outer step to the next')
    fragments: Positive = says(1, '"local": parts of the weights that take outer steps by turns; at most inner_steps')
    outer_warmup_steps: Count = says(60, '"local": outer steps up to this step are plain means')
    outer_learning_rate: Above0 = says(1.0, '"local": of outer steps')
    outer_momentum: Decay = says(0.7, '"local": of outer steps, Nesterov; somewhat lower with "pairs"')

    @model_validator(mode="after")
    def _every_field_has_effect(self) -> Averaging:
        for name, (chooser, value) in _BELONGS.items():
            default = type(self).model_fields[name].default
            usual = [default, *(each[f"averaging.{name}"] for each in FORMATS.values() if f"averaging.{name}" in each)]
            # A field without effect would still change the run id, and mislead the reader.
            if getattr(self, chooser) != value and getattr(self, name) not in usual:
                raise ValueError(
                    f'{name} has no effect without {chooser} = "{value}": leave it at its default, '
                    f"{json.dumps(default)}"
                )
        return self

    @model_validator(mode="after")
    def _outer_steps(self) -> Averaging:
        if self.sync != "local":
            return self
        # Fragments take outer steps by turns, and each turn is a step.
        if self.fragments > self.inner_steps:
            raise ValueError(
                f"fragments = {self.fragments} have no turns of their own in inner_steps = "
                f"{self.inner_steps}: choose fewer of them, or more steps"
            )
        if self.gossip and (self.sparse or is_plug_in(self.codec)):
            raise ValueError(
                f'partners = "{self.partners}" sends weights, which codec = "{self.codec}" may spoil: choose one of '
                f'{", ".join(LOCAL)}, or partners = "all"'
            )
        return self

    @property
    def delay(self) -> Delay:
        """On which version's weights each step is computed."""
        return Delay(1, self.overlap_after) if self.sync == "overlap" else NO_DELAY

    @property
    def gossip(self) -> int:
        """Of how many replicas an outer step's mean is, drawn at random; 0: of all."""
        return {"all": 0, "pairs": 2, "groups": self.group_size}[self.partners]

    @property
    def sparse(self) -> bool:
        """Does an outer step send the largest elements only?"""
        return self.codec.startswith("sparse:")

    @property
    def equal_bits(self) -> bool:
        """Do replicas that round alike have the same weights, bit by bit?"""
        return self.sync in ("exact", "overlap")


class Protocol(Table):
    """The timers of the step protocol, seconds; `manifest.timers` derives all others from them."""

    suspect_s: Seconds = says(3.0, "silence after which a peer is suspected; a sixth of it is the heartbeat interval")
    long_silence_s: Seconds = says(15.0, "silence after which a peer is given up that cannot be outvoted")

    @model_validator(mode="after")
    def _ordered(self) -> Protocol:
        if self.suspect_s > self.long_silence_s:
            raise ValueError(f"suspect_s = {self.suspect_s} <= long_silence_s = {self.long_silence_s} must hold")
        return self

    @property
    def timers(self) -> Timers:
        """These, and what follows from them."""
        return Timers(self.suspect_s, self.long_silence_s)


class Audits(Table):
    """How much of members' work is computed again by others, docs/trust.md; with 0 and 0 sums are not checked."""

    microbatches: Fraction = says(0.01, "share of microbatches of which outputs and input gradients are recomputed")
    contributions: Fraction = says(0.01, "share of contributions to a step's sum that are computed again as a whole")
    on_late: Literal["record", "rollback"] = says(
        "record", 'proven false work: "record": it stays; "rollback": the run goes back before it'
    )

    @property
    def any(self) -> bool:
        """Is anything looked at?"""
        return self.microbatches + self.contributions > 0


class Admission(Table):
    """Who may join; docs/admission.md says what "open" risks."""

    policy: Annotated[Literal["open", "invite"], CliOption(name="admission")] = says(
        "open", 'who may join: "open": anyone; "invite": whom the owner invites, who has the private half of `key`'
    )
    key: OwnerKey = says("", "the owner's public Ed25519 key, as a peer id: who may extend the run, and invite to it")

    @model_validator(mode="after")
    def _together(self) -> Admission:
        if self.policy == "invite" and not self.key:
            raise ValueError('policy = "invite" goes with a key: let `swarmnet init --admission invite` write both')
        return self


class Limits(Table):
    """What a peer accepts from the network before it takes memory."""

    max_payload_mib: Positive = says(1024, "of one message, in MiB")
    max_clock_offset_s: Seconds = says(60.0, "the largest difference of two peers' clocks; a peer beyond it is refused")


class StageSpec(Table):
    """What of a manifest the arithmetic of one stage follows from. The rest is the protocol's and the network's."""

    stage: Count
    model: Model
    lora: Lora
    cut: Cut
    training: Training
    optimizer: Optimizer
    numerics: Numerics
    averaging: Averaging
    audit: Audits

    @property
    def first(self) -> bool:
        """Does it read token ids?"""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Does it compute the loss?"""
        return self.stage == self.cut.stages - 1


class Manifest(Table):
    """A run."""

    format: Annotated[int, AfterValidator(_known_format)] = says(
        1, "of this file: it fixes the defaults of fields that are left out"
    )
    name: Annotated[Visible, CliOption("TEXT")] = says("my-run", "for people; shown by `swarmnet status`")
    model: Model = Model()
    lora: Lora = Lora()
    cut: Cut = Cut()
    initial: Initial = Initial()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    numerics: Numerics = Numerics()
    wire: Wire = Wire()
    averaging: Averaging = Averaging()
    protocol: Protocol = Protocol()
    audit: Audits = Audits()
    admission: Admission = Admission()
    limits: Limits = Limits()
    _left_out: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def left_out(self) -> frozenset[str]:
        """Dotted names of fields that the file does not name: they have the default of its format."""
        return self._left_out

    def leaving_out(self, names: Iterable[str]) -> Manifest:
        """The same run, of a file that does not name these fields."""
        copy = self.model_copy()
        copy._left_out = frozenset(names)
        return copy

    @property
    def audited(self) -> bool:
        """Does this run ask for audits? With `averaging.sync = "local"` there are none."""
        return self.averaging.equal_bits and self.audit.any

    def of_stage(self, stage: int) -> StageSpec:
        """The tables that stage `stage` computes by."""
        return StageSpec(stage=stage, **{name: table for name, table in self if name in StageSpec.model_fields})

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        """Those of every stage, in order."""
        return tuple(map(self.of_stage, range(self.cut.stages)))

    @model_validator(mode="after")
    def _together(self) -> Manifest:
        if isinstance(self.cut.layers, tuple):
            if len(self.cut.layers) != self.cut.stages:
                raise ValueError(f"cut.layers names {len(self.cut.layers)} stages, cut.stages = {self.cut.stages}")
            # Every layer is in one stage.
            if sum(self.cut.layers) != self.model.num_layers:
                raise ValueError(
                    f"cut.layers sums to {sum(self.cut.layers)}, model.num_layers = {self.model.num_layers}"
                )
        elif self.cut.stages > self.model.num_layers:
            raise ValueError(
                f"cut.stages = {self.cut.stages} is more than model.num_layers = {self.model.num_layers}: "
                f"choose fewer stages, or add --set model.num_layers={self.cut.stages}"
            )
        # Digests are per stage: another cut needs other ones.
        if len(self.initial.sha256) not in (0, self.cut.stages):
            raise ValueError(
                f"initial.sha256 holds {len(self.initial.sha256)} digests, one a stage, cut.stages = "
                f"{self.cut.stages}: rewrite the manifest with `swarmnet init --from`"
            )
        # Two stages cannot share one matrix that both change.
        if self.model.tie_embeddings and self.cut.stages > 1:
            raise ValueError("model.tie_embeddings = true needs both ends in one stage: untie, or set cut.stages = 1")
        return self

    @model_validator(mode="after")
    def _adapters(self) -> Manifest:
        model, lora = self.model, self.lora
        if lora.r and isinstance(self.cut.layers, tuple) and 0 in self.cut.layers:
            raise ValueError(f"cut.layers = {list(self.cut.layers)}: with lora.r each stage needs a layer to adapt")
        # A block of 4-bit numbers has one scale.
        inputs = {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_heads * head_dim": model.num_heads * model.head_dim,
        }
        odd = [f"model.{name} = {size}" for name, size in inputs.items() if size % NF4_BLOCK]
        if lora.base == "nf4" and odd:
            raise ValueError(f'lora.base = "nf4" needs multiples of {NF4_BLOCK}, {odd[0]} is none: choose "bf16"')
        return self

    @model_validator(mode="after")
    def _aggregates(self) -> Manifest:
        """Integers with "exact" and "overlap", floats with "local"."""
        averaging, wire, mode = self.averaging, self.wire, self.numerics.mode
        integers = averaging.sync != "local"
        # (field, its value, may it stay?, what to write instead)
        rules = (
            ("numerics.mode", mode, self.numerics.integers == integers, "fast" if integers else "fp32"),
            (
                "averaging.codec",
                averaging.codec,
                (averaging.codec in INTEGERS) == integers,
                "small" if integers else "int8",
            ),
            ("averaging.reducer", averaging.reducer, averaging.reducer == "sum" or not integers, "sum"),
            ("wire.slow", wire.slow, not (wire.slow and integers), ""),
            ("wire.slow_mbit", wire.slow_mbit, not (wire.slow and integers), 0.0),
        )
        wrong = [(name, value, write) for name, value, may_stay, write in rules if not may_stay]
        if wrong:
            found = " and ".join(f"{name} = {json.dumps(value)}" for name, value, _ in wrong)
            instead = " and ".join(f"{name} = {json.dumps(write)}" for name, _, write in wrong)
            aggregated, other = ("integers", "local") if integers else ("float vectors", "overlap")
            raise ValueError(
                f'{found}: averaging.sync = "{averaging.sync}" aggregates {aggregated}: write {instead}, or '
                f'averaging.sync = "{other}" (docs/numerics.md)'
            )
        return self
