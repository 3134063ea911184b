"""Logs and events: `log = telemetry.get(__name__)`, then `log.info("averaged", round=3, members=5)`.

`log` is the standard library's logging with fields, `events` is the file other programs read, `log.encode` is how both
write a value.
"""

from swarmnet.telemetry.log import FieldLogger, get, setup

__all__ = ["FieldLogger", "get", "setup"]
