"""What a vote signs: the sum that a stage commits, with who contributed to it; and the commits of one step. Pure.

A commit names of the contributors those that may count, MAX_COUNTING at most, and refers to them by a digest. Mostly
they are those of the step before. Then it is told without them: who has applied that step has them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace

from swarmnet import statement as signed
from swarmnet.bounds import Recent
from swarmnet.ids import PeerId, Restart
from swarmnet.messages import Commit, Exclusion, Finished, Round, Stamp, contributors_of, first_of, roll_of

_UNSIGNED = "contributors", "votes", "seats", "signatures"
"""Of a commit: its digest stands for the contributors."""

_UNCHAINED = (*_UNSIGNED, "chain", "id", "roll")
"""Fields of a commit on which the next step does not depend."""

NAMED_EVERY = 8
"""Every so many steps a commit names its contributors in any case: who came meanwhile learns them."""

_MOST_ROLLS = 4
"""Lists of contributors that are remembered of a stage, in addition to that of the last step."""


def commit_of(stamp: Stamp, finished: Finished, table: bytes = b"", *, named: bool = True) -> Commit:
    """The commit that a holder of this aggregate votes for. table: as in a commit. named: with the contributors."""
    contributors = counting(finished)
    return Commit(
        *(stamp.stage, stamp.step, stamp.chain, finished.id, finished.digest, finished.num_tokens),
        *(finished.loss_sum, finished.grad_sq_norm, finished.discarded, roll_of(contributors)),
        contributors=contributors if named else (),
        notice=finished.notice,
        late=finished.late,
        bans=finished.bans,
        table=table,
    )


def digest_of(table: tuple[Exclusion, ...]) -> bytes:
    """What stands for a table of exclusions in a commit; b"" for an empty one, which mostly it is."""
    return hashlib.sha256(b"".join(map(signed.statement, table))).digest()[:16] if table else b""


def gradient_norm(commits: Iterable[Commit]) -> float:
    """Of a step's average gradient, as the optimizer sees it: each stage divides by the tokens that it has counted."""
    return math.sqrt(math.fsum(commit.grad_sq_norm / max(commit.num_tokens, 1) ** 2 for commit in commits))


def counting(of: Finished | Round) -> tuple[PeerId, ...]:
    """The contributors that the commit of this aggregate or round names: `MAX_COUNTING` at most."""
    return tuple(sorted(first_of(contributors_of(of))))


def statement(commit: Commit, restart: Restart) -> bytes:
    """What a vote signs: everything of the commit but the votes. The chain stands for run, stage and past."""
    return signed.statement(commit, restart, without=_UNSIGNED)


def evidence(commits: Iterable[Commit]) -> bytes:
    """Hash of what the next step depends on: sums, counts, notices, exclusions and their table, not who made the sums.

    Round ids stay out, so two leaders that committed the same sum leave the same chain behind.
    """
    ordered = sorted(commits, key=lambda commit: commit.stage)
    return hashlib.sha256(b"".join(signed.statement(commit, without=_UNCHAINED) for commit in ordered)).digest()


class Rolls:
    """The contributors of commits that do not name them."""

    def __init__(self) -> None:
        self._told: dict[int, Recent[bytes, tuple[PeerId, ...]]] = {}  # stage -> digest -> contributors
        self._last: dict[int, tuple[bytes, tuple[PeerId, ...]]] = {}  # stage -> those of the last step

    def learn(self, stage: int, contributors: tuple[PeerId, ...]) -> None:
        """A commit of that stage names them, or will."""
        if contributors:
            self._told.setdefault(stage, Recent(_MOST_ROLLS))[roll_of(contributors)] = contributors

    def of(self, commit: Commit) -> tuple[PeerId, ...]:
        """The contributors that may count; () if no commit has named them here."""
        last = self._last.get(commit.stage)
        if not commit.contributors and last is not None and last[0] == commit.roll:
            return last[1]
        told = self._told.get(commit.stage)
        return commit.contributors or (told.get(commit.roll, ()) if told is not None else ())

    def applied(self, commit: Commit) -> None:
        """That was the commit of the last step."""
        self._last[commit.stage] = commit.roll, self.of(commit)

    def brief(self, commit: Commit) -> Commit:
        """The commit as it is told to those who have applied the step before."""
        last = self._last.get(commit.stage)
        known = last is not None and last[0] == commit.roll and commit.step % NAMED_EVERY
        return replace(commit, contributors=()) if known else commit

    def forget(self) -> None:
        """Nothing said before counts."""
        self._told.clear()
        self._last.clear()


@functools.lru_cache(maxsize=4096)
def stages_in(bits: bytes) -> frozenset[int]:
    """The stages of a heartbeat's `known`."""
    return frozenset(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)


def bits_of(stages: Iterable[int]) -> bytes:
    """The inverse of `stages_in`."""
    number = sum(1 << stage for stage in stages)
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


# ---------------------------------------------------------------- the commits of one step


class Barrier:
    """Collects one commit per stage of `step`. Of another stage the first one that is believed is used."""

    def __init__(self, step: int, num_stages: int) -> None:
        self.step = step
        self.missing = frozenset(range(num_stages))  # stages whose commits are not known
        self.known: tuple[Commit, ...] = ()  # in stage order; the same tuple until another commit is known
        self._commits: dict[int, Commit] = {}

    def add(self, commit: Commit) -> bool:
        """Take in a commit. Returns True if it is news."""
        if commit.step != self.step or commit.stage not in self.missing:
            return False
        self.replace(commit)
        return True

    def replace(self, commit: Commit) -> None:
        """Let this commit stand for its stage, whatever was known."""
        self._commits[commit.stage] = commit
        self.missing -= {commit.stage}
        self.known = tuple(self._commits[stage] for stage in sorted(self._commits))

    def of(self, stage: int) -> Commit | None:
        """The commit of one stage, if known."""
        return self._commits.get(stage)

    @property
    def complete(self) -> bool:
        """All stages have committed."""
        return not self.missing
