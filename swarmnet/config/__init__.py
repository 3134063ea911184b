"""What one operator chooses for one machine, and how any TOML table of ours is read, checked and written.

`table` is the base of every file's schema, `check` turns plain data into a table or one line of error, `toml` is the
text, `layers` is the precedence (flag > environment > file > default), `peer` is the peer config itself.
"""

from swarmnet.config.peer import PeerConfig

__all__ = ["PeerConfig"]
