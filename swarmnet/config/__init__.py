"""What one operator chooses for one machine, and how any TOML table of ours is read, checked and written.

`table` is the base of every file's schema, `check` turns plain data into a table or one line of error and says who wins
(flag > `--set` > environment > file > default), `toml` is the text, `peer` is the peer config itself, and `plug_in`
finds by name what other distributions bring.
"""

from swarmnet.config.peer import PeerConfig

__all__ = ["PeerConfig"]
