"""A rank as a process: `python -m swarmnet.ranks DESCRIPTOR`, its end of the line to the peer process."""

import socket
import sys

from swarmnet.ranks.process import main

main(socket.socket(fileno=int(sys.argv[1])))
