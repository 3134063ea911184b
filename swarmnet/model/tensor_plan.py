"""The tensor-parallel plan: which part of each parameter a rank holds when a peer splits its layers (arXiv:1909.08053).

`PLAN` is all of it, module by module. Norms are whole on every rank; the vocabulary need not divide: the first ranks
hold a row more, and nothing is padded. With fewer key and value heads than ranks each head is on several ranks, which
share its queries. `model.sharded` cuts tensors by it and says where ranks communicate. Pure: knows no tensors and no
group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Model

Unit = Literal["vocabulary", "heads", "key heads", "width"]
"""What ranks divide among themselves: token ids, query heads, key and value heads, channels of the MLP."""


# Which field of a `Model` says how many there are.
_COUNTS: Mapping[Unit, str] = {
    "vocabulary": "vocab_size",
    "heads": "num_heads",
    "key heads": "num_kv_heads",
    "width": "intermediate_size",
}


class Split(NamedTuple):
    """How ranks split the weight of one module; its bias is split as its rows are."""

    dim: int | None
    """Dimension that is cut; None: every rank holds all of it."""
    unit: Unit | None = None
    """What that dimension consists of."""
    partial: Literal["never", "by tokens", "by heads"] = "never"
    """Of what is whole: each rank's gradient is a term of a sum if it saw only some tokens (sequence parallelism), or
    only some heads."""


ROWS, COLUMNS = 0, 1

PLAN: Mapping[str, Split] = {
    # module                     cut by   into parts of
    "embed_tokens": Split(ROWS, "vocabulary"),
    "input_layernorm": Split(None, partial="by tokens"),
    "q_proj": Split(ROWS, "heads"),
    "k_proj": Split(ROWS, "key heads"),
    "v_proj": Split(ROWS, "key heads"),
    "q_norm": Split(None, partial="by heads"),
    "k_norm": Split(None, partial="by heads"),
    "o_proj": Split(COLUMNS, "heads"),
    "post_attention_layernorm": Split(None, partial="by tokens"),
    "gate_proj": Split(ROWS, "width"),
    "up_proj": Split(ROWS, "width"),
    "down_proj": Split(COLUMNS, "width"),
    "norm": Split(None, partial="by tokens"),
    "lm_head": Split(ROWS, "vocabulary"),
}
"""By the last module in a parameter's Hugging Face name. A layer's matrices that are cut by rows are entered with the
same input on all ranks; of those cut by columns the ranks' outputs are summed."""

_MANY = 1024  # no machine has more GPUs


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank holds of one parameter."""

    dim: int | None
    """Dimension that is cut; None: it holds all of it, and the next three are 0."""
    start: int
    stop: int
    """It holds [start, stop) of that dimension."""
    length: int
    """How long the dimension is in the whole parameter."""
    owner: bool
    """This rank is the first of those that hold these elements, and speaks for them in the whole parameter."""
    partial: bool
    """What this rank computes as their gradient is one term of a sum over the ranks that hold them. Otherwise ranks
    that hold the same elements compute the same gradient."""


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
        # Every number of ranks is tried: an error that names what works ends the search.
        if problems := self._problems(self.ranks):
            possible = [ranks for ranks in range(1, _MANY) if not self._problems(ranks)]
            raise UsageError(
                f"{self.ranks} tensor-parallel ranks cannot split this model: {'; '.join(problems)}. "
                f"Ranks that can: {', '.join(map(str, possible)) or 'none'}"
            )

    def local(self, rank: int) -> Model:
        """The dimensions of what `rank` holds."""
        return self.model.model_copy(update={field: len(self.part(unit, rank)) for unit, field in _COUNTS.items()})

    def part(self, unit: Unit, rank: int) -> range:
        """Which of them are `rank`'s: consecutive ones, its own but for key heads that it shares with neighbours."""
        whole, each = self._whole(unit), self.ranks
        # Ranges may overlap here: at least one head each.
        if unit == "key heads":
            start = rank * whole // each
            return range(start, max(start + 1, (rank + 1) * whole // each))
        most, over = divmod(whole, each)  # only the vocabulary may leave a rest
        start = rank * most + min(rank, over)
        return range(start, start + most + (rank < over))

    def slice_of(self, name: str, rank: int) -> Slice:
        """What `rank` holds of the parameter with that Hugging Face name. Raises ValueError for a name without rule."""
        *front, module, kind = name.split(".")
        if module in ("lora_A", "lora_B"):
            # The factor on the side of the matrix that is cut is cut with it. The other one is whole on all ranks, and
            # what each computes as its gradient is a term of a sum.
            target = front[-1]
            if (PLAN[target].dim == ROWS) == (module == "lora_A"):
                return Slice(None, 0, 0, 0, owner=rank == 0, partial=self.ranks > 1)
            module = target
        split = PLAN.get(module)
        # every rank would add the bias of a module with summed outputs
        if split is None or (split.dim == COLUMNS and kind == "bias" and self.ranks > 1):
            raise ValueError(f"no rule how ranks split {name}")
        if split.unit is None or (split.dim == COLUMNS and kind == "bias"):
            by_tokens = split.partial == "by tokens" and self.sequence_parallel
            partial = self.ranks > 1 and (by_tokens or split.partial == "by heads")
            return Slice(None, 0, 0, 0, owner=rank == 0, partial=partial)
        # With fewer key heads than ranks, neighbours hold the same one.
        copies = max(1, self.ranks // self.model.num_kv_heads) if split.unit == "key heads" else 1
        width = self.model.head_dim if split.unit in ("heads", "key heads") else 1  # elements of one of the unit
        places = self.part(split.unit, rank)
        return Slice(
            split.dim,
            places.start * width,
            places.stop * width,
            self._whole(split.unit) * width,
            owner=rank % copies == 0,
            partial=copies > 1,
        )

    def _whole(self, unit: Unit) -> int:
        return int(getattr(self.model, _COUNTS[unit]))

    def _problems(self, ranks: int) -> list[str]:
        model = self.model
        if ranks < 1:
            return ["there must be a rank"]
        problems = [
            f"{name} = {value} is no multiple of {ranks}"
            for name, value in (("num_heads", model.num_heads), ("intermediate_size", model.intermediate_size))
            if value % ranks
        ]
        # Either a rank has several key heads, or several ranks share one.
        if model.num_kv_heads % ranks and ranks % model.num_kv_heads:
            problems.append(f"num_kv_heads = {model.num_kv_heads} is neither a multiple nor a divisor of {ranks}")
        if model.output_bias and ranks > 1:  # outputs are summed, and the bias with them, once per rank
            problems.append("output_bias = true, which ranks would each add")
        if model.vocab_size < ranks:
            problems.append(f"vocab_size = {model.vocab_size} is less than {ranks}")
        if self.sequence_parallel and self.sequence_length % ranks:
            problems.append(
                f"sequence_length = {self.sequence_length} is no multiple of {ranks} (only sequence parallelism asks)"
            )
        return problems
