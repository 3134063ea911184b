"""Tokens: where they come from (`source`), what they are (`tokens`), and which ones a microbatch holds (`sampler`)."""
