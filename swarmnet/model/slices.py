"""Which part of each parameter a rank holds when a peer splits a stage by tensor parallelism (arXiv:1909.08053).

Matrices that a layer enters by (queries, keys, values, gate, up) are cut by rows, those it leaves by (`o_proj`,
`down_proj`) by columns, embedding and head by rows of the vocabulary; norms are whole on every rank, those over heads
too, of whose gradient each rank has a term. The vocabulary need not divide: the first ranks hold a row more, and
nothing is padded. With fewer key and value heads than ranks, each head is on several ranks, which share its queries.

A pure description by parameter name, from which `model.sharding` cuts tensors and puts them together again. Knows no
tensors and no group.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Model

_BY_QUERIES = frozenset(["q_proj"])
_BY_KEYS = frozenset(["k_proj", "v_proj"])
_BY_WIDTH = frozenset(["gate_proj", "up_proj"])
_BY_VOCABULARY = frozenset(["embed_tokens", "lm_head"])
_NORMS = frozenset(["input_layernorm", "post_attention_layernorm", "norm"])
_NORMS_OF_HEADS = frozenset(["q_norm", "k_norm"])
_MANY = 1024  # nobody has a box of more GPUs


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank holds of one parameter: [start, stop) of `length` along `dim`; with `dim` None all of it.

    owner: this rank is the first of those that hold these elements, and speaks for them in the whole parameter.
    partial: what this rank computes as their gradient is one term of a sum over the ranks that hold them. Otherwise
    ranks that hold the same elements compute the same gradient.
    """

    dim: int | None
    start: int
    stop: int
    length: int
    owner: bool
    partial: bool


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How `ranks` ranks split the layers of `model`; with `sequence_parallel` norms and residuals by tokens as well.

    sequence_length: tokens per sequence. Raises UsageError, with the numbers of ranks that would do, if they cannot.
    """

    model: Model
    ranks: int
    sequence_length: int
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if problems := self._problems(self.ranks):
            possible = [ranks for ranks in range(1, _MANY) if not self._problems(ranks)]
            raise UsageError(
                f"{self.ranks} tensor-parallel ranks cannot split this model: {'; '.join(problems)}. "
                f"Ranks that can: {', '.join(map(str, possible)) or 'none'}"
            )

    def local(self, rank: int) -> Model:
        """The dimensions of what `rank` holds."""
        return self.model.model_copy(
            update={
                "vocab_size": len(self.vocabulary(rank)),
                "intermediate_size": self.model.intermediate_size // self.ranks,
                "num_heads": self.model.num_heads // self.ranks,
                "num_kv_heads": len(self._key_heads(rank)),
            }
        )

    def vocabulary(self, rank: int) -> range:
        """The token ids whose rows `rank` holds."""
        most, over = divmod(self.model.vocab_size, self.ranks)
        start = rank * most + min(rank, over)
        return range(start, start + most + (rank < over))

    def slice_of(self, name: str, rank: int) -> Slice:
        """What `rank` holds of the parameter with that Hugging Face name. Raises ValueError for a name without rule."""
        model, leaf = self.model, name.split(".")[-2]
        if leaf in _NORMS:
            return Slice(None, 0, 0, 0, owner=rank == 0, partial=self.sequence_parallel and self.ranks > 1)
        if leaf in _NORMS_OF_HEADS:  # one for all heads, of which each rank has some
            return Slice(None, 0, 0, 0, owner=rank == 0, partial=self.ranks > 1)
        if leaf in _BY_VOCABULARY:
            rows = self.vocabulary(rank)
            return Slice(0, rows.start, rows.stop, model.vocab_size, owner=True, partial=False)
        if leaf in _BY_KEYS:
            return self._keys(rank)
        if leaf in _BY_QUERIES:
            return self._even(0, model.num_heads * model.head_dim, rank)
        if leaf in _BY_WIDTH:
            return self._even(0, model.intermediate_size, rank)
        if name.endswith("o_proj.weight"):
            return self._even(1, model.num_heads * model.head_dim, rank)
        if name.endswith("o_proj.bias"):  # of one rank only: see `_problems`
            return Slice(None, 0, 0, 0, owner=rank == 0, partial=False)
        if name.endswith("down_proj.weight"):
            return self._even(1, model.intermediate_size, rank)
        raise ValueError(f"no rule how ranks split {name}")

    def _even(self, dim: int, length: int, rank: int) -> Slice:
        part = length // self.ranks
        return Slice(dim, rank * part, (rank + 1) * part, length, owner=True, partial=False)

    def _keys(self, rank: int) -> Slice:
        heads, width = self._key_heads(rank), self.model.head_dim
        copies = max(1, self.ranks // self.model.num_kv_heads)
        return Slice(
            0,
            heads.start * width,
            heads.stop * width,
            self.model.num_kv_heads * width,
            owner=rank % copies == 0,
            partial=copies > 1,
        )

    def _key_heads(self, rank: int) -> range:
        """The key and value heads of `rank`: its own, or the one it shares with its neighbours."""
        heads = self.model.num_kv_heads
        return range(rank * heads // self.ranks, max(rank * heads // self.ranks + 1, (rank + 1) * heads // self.ranks))

    def _problems(self, ranks: int) -> list[str]:
        model = self.model
        if ranks < 1:
            return ["there must be a rank"]
        problems = [
            f"{name} = {value} is no multiple of {ranks}"
            for name, value in (("num_heads", model.num_heads), ("intermediate_size", model.intermediate_size))
            if value % ranks
        ]
        if model.num_kv_heads % ranks and ranks % model.num_kv_heads:
            problems.append(f"num_kv_heads = {model.num_kv_heads} is neither a multiple nor a divisor of {ranks}")
        if model.output_bias and ranks > 1:
            problems.append("output_bias = true, which ranks would each add")
        if model.vocab_size < ranks:
            problems.append(f"vocab_size = {model.vocab_size} is less than {ranks}")
        if self.sequence_parallel and self.sequence_length % ranks:
            problems.append(
                f"sequence_length = {self.sequence_length} is no multiple of {ranks} (only sequence parallelism asks)"
            )
        return problems
