"""Whole swarms on virtual time in one process: production peers over a memory network and emulated compute."""
