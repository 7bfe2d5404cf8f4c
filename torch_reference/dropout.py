"""Dropout whose every mask comes from an explicit seed, or is handed in (Srivastava et al. 2014; paper 5.4).

A `DropoutSource` travels down the model beside the activations. `source.at("encoder").at("layers.0")` is the source
for a part of the model, so every site has a name, the same in both twins: masks drawn by one framework can be handed
to the other under these names.

torch's usual dropout draws from one stream of random numbers, so that a mask depends on everything drawn before it:
gradient checkpointing has to save and restore the stream, and attention over blocks could not draw a tile a second
time. Here a mask is a pure function of (seed, name of the site, shape, rate); recomputing it gives the same mask.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@runtime_checkable
class DropoutSource(Protocol):
    """Where the keep masks of one part of the model come from. True = keep."""

    def at(self, name: str) -> "DropoutSource":
        """The source for the part of the model called `name`."""
        ...

    def keep(
        self, shape: tuple[int, ...], *, rate: float, device: torch.device | None = None
    ) -> Bool[Tensor, "..."] | None:
        """The keep mask of this site, or None to keep everything."""
        ...

    def keep_tile(
        self,
        lead: tuple[int, int],
        query_index: Int[Tensor, "groups queries"],
        key_index: Int[Tensor, "groups keys"],
        *,
        rate: float,
        step: int,
    ) -> Bool[Tensor, "batch heads groups queries keys"] | None:
        """The tile of an attention-weight mask at these rows and columns, for attention that works block by block.

        `lead` is (batch, heads). A drawn tile depends on `step`, so each step must ask for a different tile.
        """
        ...


class NoDropout:
    """Keeps everything: evaluation, decoding."""

    def at(self, name: str) -> "NoDropout":
        """Itself."""
        return self

    def keep(self, shape: tuple[int, ...], *, rate: float, device: torch.device | None = None) -> None:
        """None: keep everything."""
        return

    def keep_tile(self, lead: object, query_index: object, key_index: object, *, rate: float, step: int) -> None:
        """None: keep everything."""
        return


NO_DROPOUT = NoDropout()


class DropoutSeed:
    """Draws every mask with a generator of its own, seeded from one seed and the name of the site.

    torch's global random numbers are neither read nor moved on. There is no `for_rows` as in the Flax twin: a generator
    draws its mask in one go, and rows that can be drawn apart would need a generator each.
    """

    def __init__(self, seed: int | Int[Tensor, ""], path: str = ""):
        # A tensor, so that a compiled model takes a new seed every step without being compiled again.
        self.seed = seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64, device="cpu")
        self.path = path

    def at(self, name: str) -> "DropoutSeed":
        """The same seed, for the site `name` below this one."""
        return DropoutSeed(self.seed, f"{self.path}.{name}" if self.path else name)

    def keep(self, shape: tuple[int, ...], *, rate: float, device: torch.device | None = None) -> Bool[Tensor, "..."]:
        """A mask of this site, each element kept with probability 1 - rate."""
        return _bernoulli_keep(self.seed, self.path, list(shape), rate, device or torch.device("cpu"))

    def keep_tile(
        self,
        lead: tuple[int, int],
        query_index: Int[Tensor, "groups queries"],
        key_index: Int[Tensor, "groups keys"],
        *,
        rate: float,
        step: int,
    ) -> Bool[Tensor, "batch heads groups queries keys"]:
        """A different tile for every step."""
        groups = max(query_index.shape[0], key_index.shape[0])
        shape = (*lead, groups, query_index.shape[1], key_index.shape[1])
        return self.at(f"step.{step}").keep(shape, rate=rate, device=query_index.device)


class DropoutMasks:
    """Hands in masks (tensors or numpy arrays) by the name of their site, e.g. `encoder.layers.0.self_attn.weights`.

    Raises ValueError at a site for which there is no mask, or one of another shape.
    """

    def __init__(self, masks: Mapping[str, Any], path: str = ""):
        self.masks = dict(masks)
        self.path = path

    def at(self, name: str) -> "DropoutMasks":
        """The masks below `name`."""
        return DropoutMasks(self.masks, f"{self.path}.{name}" if self.path else name)

    def keep(self, shape: tuple[int, ...], *, rate: float, device: torch.device | None = None) -> Bool[Tensor, "..."]:
        """The mask that was handed in for this site."""
        if self.path not in self.masks:
            raise ValueError(f"expected a dropout mask of shape {tuple(shape)} for {self.path}, got none")
        mask = torch.as_tensor(self.masks[self.path], dtype=torch.bool, device=device)
        if tuple(mask.shape) != tuple(shape):
            raise ValueError(
                f"expected a dropout mask of shape {tuple(shape)} for {self.path}, got {tuple(mask.shape)}"
            )
        return mask

    def keep_tile(
        self,
        lead: tuple[int, int],
        query_index: Int[Tensor, "groups queries"],
        key_index: Int[Tensor, "groups keys"],
        *,
        rate: float,
        step: int,
    ) -> Bool[Tensor, "batch heads groups queries keys"]:
        """The tile of the handed-in mask; rows and columns beyond it (padding of the last block) are clipped."""
        mask = self.masks.get(self.path)
        if mask is None or len(mask.shape) != 4 or tuple(mask.shape[:2]) != tuple(lead):
            got = None if mask is None else tuple(mask.shape)
            raise ValueError(
                f"expected a dropout mask of shape {(*lead, 'queries', 'keys')} for {self.path}, got {got}"
            )
        mask = torch.as_tensor(mask, dtype=torch.bool, device=query_index.device)
        rows = query_index.clamp(0, mask.shape[2] - 1)
        columns = key_index.clamp(0, mask.shape[3] - 1)
        return mask[:, :, rows.unsqueeze(-1), columns.unsqueeze(-2)]


def apply_dropout(x: Float[Tensor, "..."], source: DropoutSource, *, rate: float) -> Float[Tensor, "..."]:
    """Zeroes elements with probability `rate` and scales the others by 1 / (1 - rate)."""
    if rate == 0.0:
        return x
    return apply_keep(x, source.keep(tuple(x.shape), rate=rate, device=x.device), rate=rate)


def apply_keep(x: Float[Tensor, "..."], keep: Bool[Tensor, "..."] | None, *, rate: float) -> Float[Tensor, "..."]:
    """x / (1 - rate) where `keep`, else 0; x itself if `keep` is None."""
    if keep is None:
        return x
    return (x / (1.0 - rate)).masked_fill(~keep, 0.0)


# An operator of its own, so that torch.compile takes it as it is: generators cannot be traced.
@torch.library.custom_op("torch_reference::bernoulli_keep", mutates_args=())
def _bernoulli_keep(seed: Tensor, path: str, shape: Sequence[int], rate: float, device: torch.device) -> Tensor:
    # A digest, not Python's hash, which differs between processes; and it makes neighbouring seeds unrelated.
    digest = hashlib.blake2b(f"{int(seed)}/{path}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device=device) >= rate


@_bernoulli_keep.register_fake
def _(seed: Tensor, path: str, shape: Sequence[int], rate: float, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device=device)
