"""Trains the Flax twin. Never imports torch: whoever trains on a TPU does not install it."""
