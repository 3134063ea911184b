"""Proofs and receipts in files: signed messages, a line each, that `swarmnet audit` checks years later.

The signature says who has written a line, and that nothing in it was changed since. What proves it is inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from swarmnet.audit.case import Verify, at_fault, contributors_in, count_of, refusal
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.messages import Case
from swarmnet.wire.signed import from_text, sign, to_text

T = TypeVar("T")

PROOF = ".proof"
"""How names of files with evidence end."""

MAX_LINE_BYTES = 1 << 20
"""Of what is signed: of a stage of thousands of replicas, all that contributed."""

MOST_READ = 2 * MAX_LINE_BYTES
"""Characters of a line that are read: more than its text may have."""


def to_line(proof: Any, writer: PeerId, signer: Callable[[bytes], bytes]) -> str:
    """A proof or a receipt as one line, with its end. signer: signs by the key of `writer`."""
    return to_text(sign(proof, writer, signer), most=MAX_LINE_BYTES) + "\n"


def from_line(text: str, kind: type[T], verify: Verify) -> T:
    """The inverse. No signature inside is looked at. Raises ValueError, in words."""
    name = kind.__name__.lower()
    if text.startswith("{"):
        raise ValueError("of an earlier version, which only that reads")
    try:
        signed = from_text(text, kind, most=MAX_LINE_BYTES)
    except ValueError as error:
        raise ValueError(f"no {name}, or a damaged one") from error
    if not signed.is_genuine(verify):
        raise ValueError("not signed by its writer")
    found: T = signed.value
    return found


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a file holds. run: as its writer states; what is signed is the commitment's chain."""

    run: RunId
    case: Case

    @property
    def run_proven(self) -> bool:
        """Does the commitment's chain belong to `run`? Only the first chain identifies its run by itself."""
        stamp = self.case.pledge.stamp
        return stamp.chain == first_chain(self.run, stamp.stage)

    def refusal(self, verify: Verify) -> str:
        """Why it proves nothing, in words; "" if it does."""
        if self.case.pledge.stamp.step == 0 and not self.run_proven:
            return "its commitment was signed in another run than the one that the file names"
        return refusal(self.case, contributors_in(self.case), verify)

    @property
    def at_fault(self) -> frozenset[PeerId]:
        """The peers that it proves at fault, if `refusal` has nothing against it."""
        return at_fault(self.case, contributors_in(self.case))

    @property
    def count(self) -> tuple[int, int]:
        """How many verifiers agree, and how many there are."""
        return count_of(self.case, contributors_in(self.case))
