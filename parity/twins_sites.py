"""Where our own two models drop out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flax_transformer.parameters import abstract_model, fixed_shapes, parameter_shapes, with_parameters
from transformer_config import TransformerConfig


class Sites:
    """Where a twin draws dropout masks for inputs of one shape: how it comes to each site, its shape and its rate."""

    def __init__(self, config: TransformerConfig, visit: Callable[..., None]):
        # Attention in blocks draws tiles, and checkpointing calls everything twice; the sites are the same.
        self.config = config.replace(attention="plain", gradient_checkpointing=False)
        self.visit = visit
        self._known: dict[Any, dict[str, _Site]] = {}

    def of(self, inputs: Mapping[str, Any]) -> dict[str, "_Site"]:
        """By name; the twin is run once for it."""
        shapes = tuple(tuple(inputs[name].shape) for name in ("src", "tgt_in"))
        if shapes not in self._known:
            recorder = RecordedSites({})
            self.visit(self.config, shapes, recorder)
            self._known[shapes] = recorder.sites
        return self._known[shapes]

    def draw(self, inputs: Mapping[str, Any], source: Any) -> dict[str, Any]:
        """Every site's mask, by asking `source` for it in the way in which the twin does."""
        masks = {}
        for name, site in self.of(inputs).items():
            at = source
            for part in site.path:
                at = at.at(part)
            masks[name] = at.keep(site.shape, rate=site.rate)
        return masks

    def rates(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """Share of zeros at each site."""
        return {name: site.rate for name, site in self.of(inputs).items()}


@dataclasses.dataclass(frozen=True)
class _Site:
    path: tuple[str, ...]
    shape: tuple[int, ...]
    rate: float


class RecordedSites:
    """A DropoutSource of both twins that keeps everything and remembers where it was asked."""

    def __init__(self, sites: dict[str, _Site], path: tuple[str, ...] = ()):
        self.sites, self.path = sites, path

    def at(self, name: str) -> "RecordedSites":
        """The source for a module of this name."""
        return RecordedSites(self.sites, (*self.path, name))

    def for_rows(self, rows: Any) -> "RecordedSites":
        """Itself: a site is the same for all rows."""
        return self

    def keep(self, shape: tuple[int, ...], *, rate: float, device: Any = None) -> None:
        """Remembers the site. Raises ValueError if it is known already."""
        name = ".".join(self.path)
        if name in self.sites:
            raise ValueError(f"expected one dropout mask for {name}, got a second")
        self.sites[name] = _Site(self.path, tuple(shape), rate)

    def keep_tile(self, *_: Any, **__: Any) -> None:
        """Never asked: attention in blocks has the sites of the plain one."""
        raise AssertionError("expected plain attention")


def port_sites(config: TransformerConfig, shapes: tuple[tuple[int, ...], ...], recorder: RecordedSites) -> None:
    """Visits the sites of the Flax twin, for `Sites`."""
    model = abstract_model(config)
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    jax.eval_shape(
        lambda params, src, tgt: with_parameters(model, params)(src, tgt, dropout=recorder),
        parameter_shapes(config) | fixed_shapes(config),
        *ids,
    )
