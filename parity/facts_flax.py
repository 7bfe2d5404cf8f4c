"""Facts of an nnx.Module."""

from flax import nnx

from parity.facts import Facts, ModuleFacts


def describe(module: nnx.Module) -> Facts:
    """Types, tensors and settings of every module."""
    return {".".join(map(str, path)): ModuleFacts(type=type(m).__name__) for path, m in nnx.iter_modules(module)}
