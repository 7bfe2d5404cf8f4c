"""Facts of a torch.nn.Module."""

import torch

from parity.facts import Facts, ModuleFacts


def describe(module: torch.nn.Module) -> Facts:
    """Types, tensors and settings of every module."""
    return {path: ModuleFacts(type=type(m).__name__) for path, m in module.named_modules()}
