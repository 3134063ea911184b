"""hivemind's DHT without the rest of hivemind.

`import hivemind` imports its averaging, optimizers and experts, and scipy with them: a seventh of the CPU time of a
starting peer and 40 MB of its memory, none of which it uses. So the package stands here with its body unread. Somebody
who asks it for a name of its own, such as `hivemind.Optimizer`, makes it read its body then.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

_SPEC = None if "hivemind" in sys.modules else importlib.util.find_spec("hivemind")
if _SPEC is not None:
    sys.modules["hivemind"] = importlib.util.module_from_spec(_SPEC)

from hivemind.dht import traverse  # noqa: E402
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage  # noqa: E402
from hivemind.p2p import P2P, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError, P2PHandlerError  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402
from hivemind.utils.logging import use_hivemind_log_handler  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402


def _read_body(name: str) -> Any:
    package = sys.modules["hivemind"]
    del package.__getattr__
    assert _SPEC is not None and _SPEC.loader is not None
    _SPEC.loader.exec_module(package)
    return getattr(package, name)


if _SPEC is not None:  # only now: hivemind's modules may look for each other in the package first
    sys.modules["hivemind"].__getattr__ = _read_body  # type: ignore[method-assign]

__all__ = [
    "DHTID",
    "P2P",
    "ControlFailure",
    "DHTLocalStorage",
    "DHTNode",
    "DHTRecord",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "RecordValidatorBase",
    "dht_pb2",
    "traverse",
    "use_hivemind_log_handler",
]
