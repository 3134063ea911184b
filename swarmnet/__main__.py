"""`python -m swarmnet` is the `swarmnet` command."""

from swarmnet.cli import main

if __name__ == "__main__":
    main()
