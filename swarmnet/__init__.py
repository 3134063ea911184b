"""swarmnet trains large language models on machines that strangers lend."""

__version__ = "0.1.0"

PROTOCOL_VERSION = (1, 0)
"""(major, minor) of the wire protocol. Peers of one run must share the major number."""
