"""Receipts, which prove the contributors of a step to third parties: a line for each step that a replica has applied.

| a receipt holds | proven by |
|---|---|
| who contributed which indexes | commitments of more than half of the voters of the commit |
| tokens of each index | their sum is in the commit, which is in the stage's chain |
| the commits of the step | the chain that the next step's contributors sign: it is a hash of this one and of them |

Of the tokens, the number of a single index is only the writer's claim: their sum alone is signed. A step without a
successor has its contributors proven, and not yet its tokens. Only the signers distinguish a forged receipt from a true
one: `audit.histories` puts receipts together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from swarmnet.audit.case import Verify
from swarmnet.audit.evidence import MOST_READ, from_line
from swarmnet.bounds import MAX_MEMBERS, Entries, Proto
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.messages import Commits, Count, Finished, Pledge, Stamp, contributors_of, first_of
from swarmnet.pledge import shares_of
from swarmnet.quorum import has_quorum
from swarmnet.statement import statement

FILES = "receipts*.*"
"""How their files are named; one each replica."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a stage counted in a step."""

    run: RunId
    stamp: Stamp
    finished: Finished
    tokens: Annotated[Mapping[int, Count], Proto(names=("indexes", "tokens"))]
    """Of each index."""
    pledges: Annotated[tuple[Pledge, ...], Entries(MAX_MEMBERS)]
    commits: Commits
    """Of all stages, in this step. Their votes are not needed."""

    @property
    def shares(self) -> bytes:
        """The digest of the contributors and their indexes (`pledge`)."""
        return shares_of(self.finished.contributions, self.finished.discarded)

    @property
    def signers(self) -> frozenset[PeerId]:
        """The contributors with a commitment here; signatures of other peers prove nothing."""
        return frozenset(pledge.peer for pledge in self.pledges) & first_of(contributors_of(self.finished))

    def refusal(self, verify: Verify) -> str:
        """Why it proves nothing, in words; "" if nothing is against it."""
        finished, stamp = self.finished, self.stamp
        shares = self.shares
        for pledge in self.pledges:
            if (pledge.stamp, pledge.digest, pledge.shares) != (stamp, finished.digest, shares):
                return "a commitment is to another aggregate"
            if not verify(pledge.peer, statement(pledge), pledge.signature):
                return "a commitment is not signed by its peer"
        if not has_quorum(self.signers, first_of(contributors_of(finished))):
            return "no more than half of the contributors have signed it"
        if {commit.step for commit in self.commits} != {stamp.step}:
            return "its commits are of another step"
        own = [commit for commit in self.commits if commit.stage == stamp.stage]
        if len(own) != 1 or not own[0].says(finished):
            return "the commit is of another aggregate"
        counted = frozenset(index for _, _, indexes in finished.contributions for index in indexes)
        if self.tokens.keys() != counted or sum(self.tokens.values()) != finished.num_tokens:
            return "its tokens are not those of the sum"
        if stamp.step == 0 and stamp.chain != first_chain(self.run, stamp.stage):
            return "it is of another run"
        return ""


def is_cut(path: Path) -> bool:
    """Was the last line not written to its end? Raises OSError."""
    with path.open("rb") as file:
        if not (size := file.seek(0, 2)):
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def append(path: Path, line: str) -> None:
    """Add a receipt to a replica's file; it replaces one that a kill cut short. Raises OSError."""
    if path.exists() and is_cut(path):
        with path.open("r+b") as file:
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
    with path.open("a", encoding="ascii") as file:
        file.write(line)


def read(path: Path, damaged: list[str], verify: Verify) -> Iterator[Receipt]:
    """The receipts of a file; of a line that a kill cut short, none. Raises OSError.

    Args:
        damaged: gets the other lines that are no receipts, each in words.
    """
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_READ), ""), 1):
            if len(line) == MOST_READ:
                damaged.append(f"line {number} is longer than any receipt, and ends the file here")
                return
            if line.endswith("\n"):
                try:
                    receipt = from_line(line, Receipt, verify)
                except ValueError as error:
                    damaged.append(f"line {number} is {error}")
                    if line.startswith("{"):
                        return  # what follows is of that version, too
                else:
                    yield receipt
