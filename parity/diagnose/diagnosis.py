"""What a suspect says where it makes the difference vanish, and the names of what can be said."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the difference is."""

    kind: str
    """A short, stable name, one of `parity.diagnose.kinds()` or a user's own."""
    module: str
    """The reference's path of the module, a parameter, or what a rung is about (`loss`, `optimizer`, ...)."""
    sentence: str
    """What the port does and what the reference does."""
    fix: str
    """What to change in the port."""
    alternatives: tuple[str, ...] = ()
    """Kinds of other explanations that fit as well, with as few changes."""

    def __str__(self) -> str:
        line = f"{self.sentence.rstrip('.')}; fix: {self.fix.rstrip('.')}."
        return f"{line} It could as well be: {', '.join(self.alternatives)}." if self.alternatives else line


_KINDS: dict[str, str] = {}


def kind(name: str, meaning: str) -> str:
    """Puts a kind on the list of `kinds()`, and returns its name. Raises ValueError if it has another meaning."""
    if _KINDS.setdefault(name, meaning) != meaning:
        raise ValueError(f"expected one meaning of {name!r}, got {meaning!r} and {_KINDS[name]!r}")
    return name


def kinds() -> dict[str, str]:
    """Every kind that the suspects here can name, and what it means."""
    import parity.diagnose  # noqa: F401 - all families have put theirs on the list

    return dict(sorted(_KINDS.items()))


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Norm-wise relative error; NaN equals NaN and inf inf where both have it. Infinite for different shapes."""
    if got.shape != expected.shape:
        return float("inf")
    finite = np.isfinite(expected)
    if not finite.all() or not np.isfinite(got).all():
        if not np.array_equal(np.isfinite(got), finite) or not np.array_equal(
            np.nan_to_num(got[~finite], nan=0.5), np.nan_to_num(expected[~finite], nan=0.5)
        ):
            return float("inf")
        got, expected = got[finite], expected[finite]
    difference, scale = float(np.linalg.norm((got - expected).ravel())), float(np.linalg.norm(expected.ravel()))
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else float("inf")
