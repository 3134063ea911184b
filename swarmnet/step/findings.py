"""Microbatches without a finite gradient, as members find them, and when a step leaves one out. Pure.

A microbatch is a pure function: more than half of the members that found it non-finite settle it.
"""

from __future__ import annotations

from collections.abc import Set

from swarmnet.ids import PeerId
from swarmnet.messages import Report
from swarmnet.step.actions import Action, Note
from swarmnet.step.ledger import Ledger


class Findings:
    """Those of one keeper. found_by: index -> who found it non-finite. halted: the step left out more than it may."""

    def __init__(self, step: int, *, max_void: int) -> None:
        self._step, self._max_void = step, max_void
        self.found_by: dict[int, set[PeerId]] = {}
        self.halted = False

    def hear(self, peer: PeerId, report: Report) -> None:
        """What a member has found."""
        for index in report.non_finite:
            self.found_by.setdefault(index, set()).add(peer)

    def alone(self, ledger: Ledger) -> list[Action]:
        """Who has found what was counted all the same."""
        names = {peer for index, found_by in self.found_by.items() if index not in ledger.voided for peer in found_by}
        return [Note("finds_alone", {"step": self._step, "peer": peer}) for peer in sorted(names)]

    def void(self, ledger: Ledger, members: Set[PeerId]) -> list[Action]:
        """Take what is settled out of the ledger."""
        actions: list[Action] = []
        for index, found_by in self.found_by.items():
            confirmed = 2 * len(found_by & members) > len(members)
            if confirmed and index not in ledger.voided and ledger.void(index):
                actions.append(Note("voided", {"step": self._step, "index": index}))
        if len(ledger.voided) > self._max_void and not self.halted:
            self.halted = True
            actions.append(
                Note(
                    "halted",
                    {
                        "step": self._step,
                        "reason": f"{len(ledger.voided)} microbatches of step {self._step} gave no gradient that can "
                        f"be counted (not finite, or too large for the grid; training.max_void = {self._max_void}): "
                        "lower the learning rate or numerics.grid_bits and start again",
                    },
                )
            )
        return actions
