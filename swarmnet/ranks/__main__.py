"""A rank as a process: `python -m swarmnet.ranks DESCRIPTOR`, the number of its end of the rank channel."""

import socket
import sys

from swarmnet.ranks.process import main

main(socket.socket(fileno=int(sys.argv[1])))
