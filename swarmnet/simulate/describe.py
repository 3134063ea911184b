"""One replica's state in a line, for the message of a run that failed."""

from __future__ import annotations

from swarmnet.peer.replica import Replica


def standing(replica: Replica) -> str:
    """Where the replica stands in its step, and its keeper if it is one."""
    member, pipeline = replica.member, replica.execution
    account, part, keeper = member.account, member.part, member.keeper
    works = {step: sorted(tasks.by_index) for step, tasks in pipeline.steps.items()}
    line = (
        f"stage {member.stage} v{member.version} synced={member.synced} promised={member.promised} "
        f"gen={account.generation.number} asked={sorted(account.asked)} granted={sorted(account.granted)} "
        f"summed={sorted(account.summed)} round={part.round and part.round.id} exchange={part.exchange} "
        f"R={part.finished and part.finished.id} commits={[commit.stage for commit in member.barrier.known]} "
        f"applying={member.applying} works={works} queue={pipeline.queue}"
    )
    if keeper is None:
        return line
    return (
        f"{line} keeper(members={sorted(keeper.members)} owners={keeper.ledger.owners} acks={sorted(keeper.acks)} "
        f"commit={keeper.commit is not None})"
    )
