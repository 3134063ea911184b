"""Who counted what, proven to anybody: a line for each step that a replica has applied.

| a receipt holds | proven by |
|---|---|
| who contributed which indexes | pledges of more than half of those whose votes make a commit |
| tokens of each index | their sum is in the commit, which is in the stage's chain |
| the commits of the step | the chain that the next step's contributors sign: it is a hash of this one and of them |

Of the tokens, what a single index had is the writer's word: the sum alone is signed. A step whose successor is not
there has its contributors proven, and not yet its tokens.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.audit.pledge import shares_of, statement
from swarmnet.audit.proof import Verify
from swarmnet.bounds import ANY_RUN
from swarmnet.errors import BadMessage
from swarmnet.ids import Chain, PeerId, RunId, first_chain, next_chain
from swarmnet.messages import Commit, Finished, PartData, Pledge, Stamp, TrailStep, contributors_of, first_of
from swarmnet.wire.convert import Reader, write_answer

FILES = "receipts*.jsonl"
"""How their files are named; one each replica."""

Digested = Callable[[Iterable[Commit]], bytes]
"""What of a step's commits goes into the chain (`step.commits.evidence`)."""

_READER = Reader(ANY_RUN)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a stage counted in a step."""

    run: str
    stamp: Stamp
    finished: Finished
    tokens: Mapping[int, int]
    """Of each index."""
    pledges: tuple[Pledge, ...]
    commits: tuple[Commit, ...]
    """Of all stages, in this step. Their votes are not needed."""

    def to_line(self) -> str:
        """JSON, with its end of line."""
        losses = {index: (0.0, tokens) for index, tokens in self.tokens.items()}
        part = write_answer(PartData(losses=losses, finished=self.finished, pledges=self.pledges))
        trail = write_answer(TrailStep(None, self.commits))
        told = {"run": self.run, "stage": self.stamp.stage, "step": self.stamp.step}
        return json.dumps({**told, "sum": _text(part), "commits": _text(trail)}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Receipt:
        """The inverse. No signature is looked at. Raises ValueError, in words."""
        try:
            table = json.loads(line)
            part, trail = _answer(table["sum"]), _answer(table["commits"])
            run, about = str(table["run"]), (table["stage"], table["step"])
        except json.JSONDecodeError as error:
            raise ValueError("no receipt: it is not JSON") from error
        except (BadMessage, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError("no receipt: its fields are damaged") from error
        if not isinstance(part, PartData) or not isinstance(trail, TrailStep) or part.finished is None:
            raise ValueError("no receipt: it has no sum or no commits")
        # A receipt without a pledge is of nothing.
        if not part.pledges or (part.pledges[0].stamp.stage, part.pledges[0].stamp.step) != about:
            raise ValueError("no receipt: it has no pledges of its stage and step")
        tokens = {index: count for index, (_, count) in part.losses.items()}
        return cls(run, part.pledges[0].stamp, part.finished, tokens, part.pledges, trail.commits)

    def refusal(self, verify: Verify) -> str:
        """Why it proves nothing, in words; "" if nothing is against it."""
        finished, stamp = self.finished, self.stamp
        shares, jury = shares_of(finished.contributions, finished.voided), first_of(contributors_of(finished))
        for pledge in self.pledges:
            if (pledge.stamp, pledge.digest, pledge.shares) != (stamp, finished.digest, shares):
                return "a pledge is of another sum"
            if not verify(pledge.peer, statement(pledge), pledge.signature):
                return "a pledge is not signed by its peer"
        if 2 * len({pledge.peer for pledge in self.pledges} & jury) <= len(jury):
            return "no more than half of the contributors have signed it"
        if {commit.step for commit in self.commits} != {stamp.step}:
            return "its commits are of another step"
        own = [commit for commit in self.commits if commit.stage == stamp.stage]
        if len(own) != 1 or not own[0].says(finished):
            return "the commit is of another sum"
        counted = frozenset(index for _, _, indexes in finished.contributions for index in indexes)
        if self.tokens.keys() != counted or sum(self.tokens.values()) != finished.num_tokens:
            return "its tokens are not those of the sum"
        if stamp.step == 0 and stamp.chain != first_chain(RunId(self.run), stamp.stage):
            return "it is of another run"
        return ""


@dataclass(slots=True)
class MemberTally:
    """What one member counted in one stage."""

    steps: int = 0
    indexes: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Account:
    """What receipts prove together."""

    tallies: dict[tuple[int, PeerId], MemberTally] = field(default_factory=dict)
    """(stage, member) -> what it counted."""
    tokens: Counter[int] = field(default_factory=Counter)
    """stage -> tokens of the commits: the sum over its members."""
    steps: Counter[int] = field(default_factory=Counter)
    linked: Counter[int] = field(default_factory=Counter)
    """stage -> steps whose commits the next receipt's chain proves."""
    missing: Counter[int] = field(default_factory=Counter)
    """stage -> steps between the first and the last one without a receipt."""
    refused: list[str] = field(default_factory=list)
    """What was not counted, or does not fit, in words."""


def account(receipts: Iterable[Receipt], verify: Verify, digested: Digested) -> Account:
    """Prove receipts of one run, of any replicas: of each stage and step one counts."""
    found, kept = Account(), {}  # type: ignore[var-annotated]
    ordered = sorted(receipts, key=lambda receipt: receipt.stamp.restart)
    for receipt in ordered:
        place = receipt.stamp.stage, receipt.stamp.step
        if why := receipt.refusal(verify):
            found.refused.append(f"stage {place[0]} step {place[1]}: {why}")
        # After the run went back, the newer one stands.
        elif place not in kept or kept[place].stamp.restart < receipt.stamp.restart:
            kept[place] = receipt
        elif kept[place].finished.digest != receipt.finished.digest:
            found.refused.append(f"stage {place[0]} step {place[1]}: two sums are proven")
    for stage in sorted({stage for stage, _ in kept}):
        _count(found, stage, [kept[place] for place in sorted(kept) if place[0] == stage], digested)
    return found


def _count(found: Account, stage: int, receipts: list[Receipt], digested: Digested) -> None:
    newest = max(receipt.stamp.restart for receipt in receipts)
    # The run gave these up, and has not yet come to those steps again.
    stand = [r for r in receipts if r.stamp.restart == newest or r.stamp.step < newest.version]
    for at, receipt in enumerate(stand):
        found.steps[stage] += 1
        found.tokens[stage] += receipt.finished.num_tokens
        for peer, _, indexes in receipt.finished.contributions:
            if indexes:
                tally = found.tallies.setdefault((stage, peer), MemberTally())
                tally.steps += 1
                tally.indexes += len(indexes)
                tally.tokens += sum(receipt.tokens[index] for index in indexes)
        if at + 1 == len(stand):
            continue
        gap = stand[at + 1].stamp.step - receipt.stamp.step - 1
        found.missing[stage] += gap
        if not gap:
            linked = stand[at + 1].stamp.chain in _chains_after(stand[: at + 1], digested)
            found.linked[stage] += linked
            if not linked:
                found.refused.append(f"stage {stage} step {receipt.stamp.step}: the next one's chain does not follow")


def _chains_after(receipts: Sequence[Receipt], digested: Digested) -> Iterator[Chain]:
    last = receipts[-1]
    yield next_chain(last.stamp.chain, digested(last.commits))
    # Where steps overlap, a step names the chain of a version earlier, and the first that does names its predecessor's.
    yield last.stamp.chain
    if len(receipts) > 1 and receipts[-2].stamp.step == last.stamp.step - 1:
        yield next_chain(last.stamp.chain, digested(receipts[-2].commits))


def is_cut(path: Path) -> bool:
    """Was the last line not written to its end? Raises OSError."""
    with path.open("rb") as file:
        if not (size := file.seek(0, 2)):
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def append(path: Path, receipt: Receipt) -> None:
    """Add a line to a replica's file, in place of one that a kill cut short. Raises OSError."""
    if path.exists() and is_cut(path):
        with path.open("r+b") as file:
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
    with path.open("a", encoding="ascii") as file:
        file.write(receipt.to_line())


def read(path: Path) -> Iterator[Receipt]:
    """The receipts of a file; of a line that a kill cut short, none. Raises OSError; ValueError, in words."""
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                try:
                    yield Receipt.from_line(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is {error}") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _answer(text: str) -> object:
    return _READER.answer(base64.b64decode(text, validate=True))[0]
