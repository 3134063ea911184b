"""A rank as a process: `python -m swarmnet.ranks CHANNEL STORE MEMORY`, each the number of a descriptor."""

import sys

from swarmnet.ranks.process import main

main(*map(int, sys.argv[1:]))
