"""`sync = "local"`: which elements take an outer step at which step. Pure.

The flat weights of a stage are cut into contiguous fragments, each of which takes one every `inner_steps` steps; the
fragments' turns are spread evenly over that time (Streaming DiLoCo, arXiv:2501.18512), so that the traffic is. With one
fragment all of them do at once (DiLoCo, arXiv:2311.08105). In the last step everything is, whosever turn it
is: a run ends with what all its replicas have learned. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """The outer steps of one stage of `num_elements`. fragments <= inner_steps: no two have the same turn."""

    num_elements: int
    inner_steps: int
    fragments: int
    total_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.inner_steps:
            raise ValueError(f"{self.fragments} fragments have no turns of their own in {self.inner_steps} steps")

    def fragment(self, number: int) -> Range:
        """Elements [start, stop) of one fragment. Together they are all elements, in order."""
        start, stop = (self.num_elements * edge // self.fragments for edge in (number, number + 1))
        return start, stop

    def due(self, step: int) -> Range | None:
        """The elements of which the round of `step` takes an outer step; None: this is an inner step only.

        Never in step 0: nobody has moved yet.
        """
        if step == 0:
            return None
        if step == self.total_steps - 1:
            return 0, self.num_elements
        turn = step % self.inner_steps
        number = -(-turn * self.fragments // self.inner_steps)  # the only one that could have this turn
        if number < self.fragments and turn == self._turn(number):
            return self.fragment(number)
        return None

    def plain(self, step: int) -> bool:
        """Is an outer step here still plain (`stage.outer`)?"""
        return step <= self.warmup_steps

    def _turn(self, number: int) -> int:
        """Fragment 0 goes with the full rounds of inner steps, the others in between."""
        return number * self.inner_steps // self.fragments
