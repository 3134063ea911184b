"""The step protocol: assignments of microbatches, complete aggregates, commits, weight updates. The theory of it.

One step sums the gradients of microbatches 0 .. M - 1 in every stage, each exactly once, and then moves the weights of
all stages. docs/protocol.md has the rules; rule numbers in this package refer to it.
tests/transcripts shows steps message by message, most of them with a fault. Everything but `driver` is pure:
events and `now` go in as method calls, and calls of a host come out (`host`): in a peer that is the driver.

An index in the claims of one replica, under one generation, follows `ledger.CLAIMS`:

| event | when | what follows |
|---|---|---|
| begin | work on it begins here | `MemberState.wants`, on every tick until it is answered |
| assign | `StagePlan.assigned` | its weight gradient may be accumulated |
| move | `StagePlan.moved` | callers go to the assignee |
| drop | the work is dropped | `MemberState.returns`, if it was assigned |
| accumulate | its weight gradient is in the accumulator | the next whole `MemberState`, on a tick |
| discard | `StagePlan.evicted`: discard; or the accumulator is lost | the next generation; its work is offered again |

A step in one replica (`open_step.OpenStep.phase`) follows `open_step.PHASES`:

| event | from | to | when |
|---|---|---|---|
| join | counting, holding | exchanging | `StagePlan.attempt` names exactly what is here: the accumulator is frozen |
| leave | exchanging | counting | the round is given up |
| complete | exchanging | holding | the complete aggregate is here: it is signed and reported |
| commit | counting, exchanging, holding, collecting | collecting | the leader sends a certificate, or votes make one |
| complete | collecting | committed | the aggregate that the certificate names is here |
| lose | collecting | counting | all replicas that held it are gone: the stage makes it again |
| apply | committed | applying | a commit of every stage is known (`commits.Barrier`) |

The next version begins when the optimizer step is done.

A leader's term (`leader.Leader.phase`, `leader.DUTIES`), in one replica, for one step, under one ballot:

| phase | until | the leader |
|---|---|---|
| hearing | all replicas in touch that are not new have reported, or are left out | enters reports in the assignments |
| assigning | every index has an assignee | answers claims, orders free indexes, opens a round |
| aggregating | a quorum has signed one aggregate | repeats the round, collects reports of members that hold it up |
| certified | all members hold that aggregate, or are left out | waits for those that are nearly there |
| committed | the step is applied | tells the commit |

A higher ballot ends a term at any time (`election`): the next leader rebuilds the assignments from reports. Safety does
not depend on any of it: a contribution to a round is bound to (peer, generation, exact index set), and the sets of a
round are disjoint and complete. A wrong leader wastes time; it cannot make a wrong aggregate.

| who | acts on | module |
|---|---|---|
| member | events of its own replica, messages, ticks; finds the step that a message is about | `member` |
| open step | claims, grants, rounds, commits of one step | `open_step`, `ledger` |
| leader | member states | `leader`, `followers`, `rounds`, `ledger` |
| every replica, privately | which replicas are live, which ones vote | `view`, `membership` |
| the same | which one leads, which ones were late | `election`, `lateness` |
| every replica, by the commits | which peers are not waited for | `exclusion` |
| every replica, every few steps | whether weights are still equal | `drift` |
"""
