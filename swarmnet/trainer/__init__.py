"""Feeds a run: microbatches in, losses out. Holds no weights."""
