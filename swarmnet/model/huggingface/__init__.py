"""Checkpoints in Hugging Face's layout: what their config means, one stage's tensors of them, and writing a model.

Knows no run and no network, and needs no library of Hugging Face's but safetensors.
"""
