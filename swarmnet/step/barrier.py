"""The commits of one step: what they say of a sum that all hold, and that nobody applies before all are known (rules 16
and 17). Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from swarmnet.messages import Commit


class Barrier:
    """Collects one commit per stage of `step`. The first one heard of another stage stands: forks are equal."""

    def __init__(self, step: int, num_stages: int) -> None:
        self.step, self.num_stages = step, num_stages
        self._commits: dict[int, Commit] = {}

    def add(self, commit: Commit) -> bool:
        """Take in a commit. Returns True if it is news."""
        if commit.step != self.step or not 0 <= commit.stage < self.num_stages or commit.stage in self._commits:
            return False
        self._commits[commit.stage] = commit
        return True

    def replace(self, commit: Commit) -> None:
        """Let this commit stand for its stage, whatever was known."""
        self._commits[commit.stage] = commit

    def of(self, stage: int) -> Commit | None:
        """The commit of one stage, if known."""
        return self._commits.get(stage)

    @property
    def known(self) -> tuple[Commit, ...]:
        """Commits known so far, in stage order."""
        return tuple(self._commits[stage] for stage in sorted(self._commits))

    @property
    def complete(self) -> bool:
        """All stages have committed."""
        return len(self._commits) == self.num_stages


def evidence(commits: Iterable[Commit]) -> bytes:
    """Hash of what an optimizer step depends on: the sums and counts, not who made them.

    Round ids stay out, so two keepers that committed the same sum leave the same chain behind.
    """
    digest = hashlib.sha256()
    for commit in sorted(commits, key=lambda c: c.stage):
        digest.update(
            struct.pack("<qqqdd", commit.stage, commit.step, commit.num_tokens, commit.loss_sum, commit.grad_sq_norm)
        )
        digest.update(commit.digest)
        digest.update(",".join(map(str, sorted(commit.voided))).encode())
    return digest.digest()
