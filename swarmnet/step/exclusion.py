"""Which peers the steps of a stage do not wait for, because they were late or are banned. Pure.

The table follows from commits alone, so it is equal at every replica that has applied them: a commit
names the peers that were late (`late`) or are banned (`bans`), and has the digest of the table before it (`table`). The
chain of commits covers all three, so a replica that is told a table can check it.

| event | table |
|---|---|
| a commit of step t names a peer as late | its level rises by one, to 3 at most; excluded until step t + 1 + back-off |
| a commit of step t names a peer that is excluded | the same back-off starts again |
| a commit of any stage bans a peer | it is excluded for ever |
| each 128 steps after the end of its exclusion | its level falls by one; at 0 the peer is forgotten |

| level | 1 | 2 | 3 |
|---|---|---|---|
| back-off, steps | 32 | 64 | 128 |

No step waits for an excluded peer, and it is assigned no index, unless the other voters in touch are no quorum
(`Leader._pass_over`). It computes, answers calls, fetches what was committed, and votes: it stays a voter until it
could have contributed again. It leads no step until it is forgotten, as a bad leader costs more time than the shortest
exclusion lasts.
Silence and crashes exclude no peer.

Of the voters fewer than half are excluded at a time: those that were named last. So a leader that names correct peers
does not keep the next leader from naming it, and that one does once the leader names one of them again (`Lateness`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from swarmnet.ids import PeerId
from swarmnet.messages import FOR_EVER, MAX_EXCLUSIONS, MAX_LEVEL, Ban, Commit, Exclusion
from swarmnet.quorum import minority

BACK_OFF = (32, 64, 128)
CLEAN = 128
"""Steps after the end of an exclusion in which the level falls by one."""

_MOST_LATE = 256
"""Late peers in a table. Invariant: bans take no entries from them, else a banned peer would free a late one."""

Table = tuple[Exclusion, ...]
"""The banned peers in the order of their bans, of too many the latest; then the late ones by name."""


def after(table: Table, commit: Commit, bans: Iterable[Ban] = ()) -> Table:
    """The table once this commit is applied. bans: of all stages in its step."""
    step = commit.step + 1
    found = {
        each.peer: each for each in table if _level(each, step) > 0 or each.peer in commit.late
    }  # an end moves only with a new name: the level at any step follows from it
    for peer in commit.late:
        before = found.get(peer)
        if before is not None and before.until_step == FOR_EVER:
            continue  # no leader lifts a ban
        # One leader may name the same peer in each of its steps.
        level = 1 if before is None else min(max(_level(before, step), 0) + (before.until_step <= step), MAX_LEVEL)
        found[peer] = Exclusion(peer, step + BACK_OFF[level - 1], level)
    found |= {ban.peer: Exclusion(ban.peer, FOR_EVER, MAX_LEVEL) for ban in bans}
    banned = [each for each in found.values() if each.until_step == FOR_EVER]
    late = [each for each in found.values() if each.until_step < FOR_EVER]
    latest = sorted(late, key=lambda each: (-each.until_step, each.peer))[:_MOST_LATE]
    return (*banned[-(MAX_EXCLUSIONS - _MOST_LATE) :], *sorted(latest, key=lambda each: each.peer))


def _level(exclusion: Exclusion, step: int) -> int:
    return exclusion.level - max(step - exclusion.until_step, 0) // CLEAN


def remembered(table: Table, step: int) -> list[Exclusion]:
    """The exclusions that are not forgotten at this step: the one that was committed last first."""
    found = [each for each in table if _level(each, step) > 0]
    return sorted(found, key=lambda each: (BACK_OFF[each.level - 1] - each.until_step, each.peer))


def passed_over(worst_first: Iterable[PeerId], live: Set[PeerId]) -> frozenset[PeerId]:
    """Which of these peers a step goes on without: fewer than half of the live voters, and all that do not live."""
    ordered: Sequence[PeerId] = list(dict.fromkeys(worst_first))
    living = [peer for peer in ordered if peer in live]
    return frozenset(peer for peer in ordered if peer not in live) | frozenset(living[: minority(live)])
