"""hivemind logs through a handler of its own, hung up at import: at our default level nothing of it is heard."""

import os
import subprocess
import sys


def test_hivemind_stays_silent_even_with_its_own_handler() -> None:
    code = (
        "from swarmnet import telemetry; telemetry.setup()\n"
        "from hivemind.utils.logging import get_logger\n"
        "log = get_logger('hivemind.dht.node')\n"
        "log.info('chatter'); log.warning('chatter'); log.error('chatter')\n"
        "telemetry.get('swarmnet.x').event('heard')"
    )
    env = {key: value for key, value in os.environ.items() if key != "HIVEMIND_LOGLEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "" and done.stderr.split(maxsplit=1)[1] == "heard\n"
