"""Tensors next to gRPC, on plain TCP connections in sealed records (docs/data-plane.md).

`pool` opens connections and takes them, `connection` carries one payload at a time each way, `records` seals and opens.
"""
