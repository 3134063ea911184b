"""What counts: who owns which microbatch, when a stage's sum is whole, and when weights may move.

The rules are those of docs/protocol.md; rule numbers in this room refer to it. Everything but `driver` is pure:
messages and `now` in, actions out.
"""
