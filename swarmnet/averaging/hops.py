"""One member's hops through a round: in which groups it takes part, and what of its last round stands in them.

A sum is made of contributions, and two sums of the same contributions in the same pieces are the same bytes. So where a
round is opened again and a group has not changed, what was summed in it is not asked for, sent and summed again. Knows
no bytes and no streams (`averaging.butterfly`).
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmnet.averaging.butterfly import Butterfly, ExchangeContext, Losses
from swarmnet.averaging.gossip import partners
from swarmnet.averaging.grid import Group, groups, lone_group
from swarmnet.averaging.parts import Range
from swarmnet.errors import Refused, RejectCode
from swarmnet.messages import Round


def plan(context: ExchangeContext, current: Round, span: Range, *, group_size: int, private: bool) -> list[Group]:
    """The groups that sum this span for me, hop by hop. private: my partners, random ones, and I among ourselves.

    Raises Refused: who came after the round was opened has no partners in it, and fetches the sum once somebody has it.
    """
    block = context.engine.block
    if private:
        if context.me not in current.receivers:
            raise Refused(RejectCode.NOT_FOUND, "no partner in a round that was opened before I came")
        found = partners(context.me, current.receivers, 2, current.stamp, current.id)
        return [lone_group(current, found, span, block=block)]
    return groups(context.me, current, span, group_size=group_size, block=block)


def stand(
    context: ExchangeContext, current: Round, planned: Sequence[Group], losses: Losses, before: Sequence[Butterfly]
) -> tuple[Butterfly, ...]:
    """My butterflies of a round, each on the one below. before: of my last round.

    A sum of that is used again if it is the same round, tried again, or this one follows at once, and nothing that it
    is made of has changed: members, generations, microbatches, order, pieces. Only at once: in between a contributor
    may have taken part in a round that its reducers never heard of, and owe no more what they have summed
    (`stage.feedback`).
    """
    made: list[Butterfly] = []
    for group in planned:
        below = next((hop for hop in reversed(made) if hop.group.hop == group.hop - 1), None)
        kept = next((hop for hop in before if hop.group == group and _follows(current, hop.round)), None)
        made.append(Butterfly(context, current, group, losses, below=below, kept=kept))
    return tuple(made)


def _follows(current: Round, before: Round) -> bool:
    one, other = before.id, current.id
    return before.stamp == current.stamp and one.ballot == other.ballot and other.number - one.number in (0, 1)


def contributes_alike(before: Sequence[Butterfly], mine: Sequence[Butterfly]) -> bool:
    """Do I contribute the same in the same pieces as in my last round, however long ago in this step?"""
    if not before or before[0].round.stamp != mine[0].round.stamp:
        return False
    old, new = before[0], mine[0]
    return old.said is not None and (old.said, old.group.chunks) == (new.said, new.group.chunks)
