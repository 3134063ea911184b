"""Peers behind routers: whether others can dial this peer, and how they reach it if not (docs/nat.md).

`dial_back` asks members to dial this peer, `port_mapping` asks the router at home for a port. A peer that cannot be
dialled reserves places at relays (`hidden`, `relay`, `relay_book`); `circuits` joins byte streams there.
`punch` opens a direct connection through two routers, and `kinds` decides whom it dials.
"""
