"""Build and run one peer: `replica` is the map of what it is made of, `run` the process."""
