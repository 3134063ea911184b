"""Faults for a swarm under test, and what must hold all the same: for `swarmnet local`, `swarmnet simulate` and tests.

fault.py       one `Fault`, its targets, and its text: chaos files, `--kill`, `random:SEED`
schedule.py    when a fault is due, which replica it is done to, who is started again
swarm.py       what faults are done to, virtual or real processes, and the one module that does them
injector.py    a peer or trainer as a process with faults below it
byzantine.py   replicas that compute or send something else
doubles.py     a transport, a service and a directory that answer by script
virtual_*.py   a whole swarm on virtual time, with production code: engine, device, disk, reference
process_swarm.py  a whole swarm of real processes: children, what each is told, what is done to it
reference.py   one process that trains the whole model
plan.py        its shape, timers and links
meeting.py     rounds of many peers, without streams
clock.py       a loop with a time that jumps, and processes that are stopped and killed
network.py     a network in memory: links, cuts, loss, and intercepts that drop or change one message
directory.py   a directory in memory
invariants.py  each index once, equal digests, the losses of one process
"""
