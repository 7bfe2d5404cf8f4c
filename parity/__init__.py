"""Moves weights between PyTorch and Flax, and proves that two models compute the same thing."""
