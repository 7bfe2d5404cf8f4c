"""Which pieces a trained model attends to in one sentence (paper 3.2, appendix): every layer and head, as figures.

The weights are those before dropout. The target is fed as in training: the decoder reads BOS and the translation, and
at each position predicts the piece that follows.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from flax_transformer.decoding import greedy
from flax_transformer.parameters import abstract_model, with_parameters
from flax_transformer.transformer import Transformer
from train.translate import TrainedRun
from transformer_config import LengthConfig

MOST_PIECES = 200
"""Of a sentence or a translation: no map of more can be read, and a page of all its weights would be huge."""

_GREY = "#555555"
_LARGEST_CELL, _LARGEST_MAP = 0.2, 8.0
"""Inches."""
_LARGEST_FONT, _SMALLEST_FONT = 9.0, 4.0
"""Points."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One of the three attentions of the paper's figure 1."""

    stack: Literal["encoder", "decoder"]
    module: Literal["self_attn", "cross_attn"]
    title: str
    about: str
    queries: Literal["source", "target"]
    keys: Literal["source", "target"]

    def name(self, layer: int) -> str:
        """What `Transformer.attention_weights` calls it: `decoder.layers.0.cross_attn`."""
        return f"{self.stack}.layers.{layer}.{self.module}"


KINDS = (
    Kind(
        stack="encoder",
        module="self_attn",
        title="Encoder self-attention",
        about="Every source piece (row) attends to all source pieces (columns).",
        queries="source",
        keys="source",
    ),
    Kind(
        stack="decoder",
        module="self_attn",
        title="Decoder self-attention",
        about="Every target piece (row) attends to itself and to the target pieces before it (columns).",
        queries="target",
        keys="target",
    ),
    Kind(
        stack="decoder",
        module="cross_attn",
        title="Cross-attention",
        about="Every target piece (row), from which the next one is predicted, attends to all source pieces (columns).",
        queries="target",
        keys="source",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The weights of one attention: of all heads of a kind in a layer."""

    kind: Kind
    layer: int
    weights: Float32[ndarray, "heads queries keys"]

    @property
    def name(self) -> str:
        """As in the model: `decoder.layers.0.cross_attn`."""
        return self.kind.name(self.layer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """All that is shown of one sentence."""

    sentence: str
    translation: str
    given: bool
    """Whether the translation was given; if not, it is the model's own, decoded greedily."""
    finished: bool
    """False for a translation of the model that was cut at the limit on length."""
    pieces: Mapping[str, tuple[str, ...]]
    """Of `source`, with EOS at its end, and of `target` as the decoder reads it, with BOS before it."""
    predicted: tuple[str, ...]
    """What follows each target piece."""
    attentions: tuple[Attention, ...]
    """Kind after kind, layer after layer."""


def attention_maps(trained: TrainedRun, sentence: str, *, translation: str | None = None) -> AttentionMaps:
    """The weights of every attention of a run's model, for a sentence and a translation, by default its own.

    They are computed by attention='plain' whatever the run was trained with: the implementations agree up to rounding,
    and not all have weights to show. Raises ValueError for text that is empty or no UTF-8, and for more pieces than
    `MOST_PIECES` or than the model has positions.
    """
    config = trained.config.model.replace(attention="plain")
    tokenizer, limit = trained.tokenizer, min(config.sequence_limit or MOST_PIECES, MOST_PIECES)
    (src,) = tokenizer.encode_sources([_text(sentence, name="sentence")])
    _check_length(src, limit, name="sentence")
    model = with_parameters(abstract_model(config), trained.params)
    if translation is None:
        # At most as long as the run translates.
        max_len = min(max(trained.config.evaluation.max_decode_len, 2 * len(src)), limit)
        written = _greedy(model, src, LengthConfig(max_len=max_len, **trained.config.search.of_vocabulary))
    else:
        (written,) = tokenizer.encode_targets([_text(translation, name="translation")])
        _check_length(written, limit, name="translation")
    read = [config.bos_id, *written[:-1]]
    weights = jax.jit(Transformer.attention_weights)(model, jnp.array([src]), jnp.array([read]))
    layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    return AttentionMaps(
        sentence=sentence.strip(),
        translation=tokenizer.decode([written])[0] if translation is None else translation.strip(),
        given=translation is not None,
        finished=written[-1] == config.eos_id,
        pieces={"source": tokenizer.readable(src, "source"), "target": tokenizer.readable(read, "target")},
        predicted=tokenizer.readable(written, "target"),
        attentions=tuple(
            Attention(kind=kind, layer=layer, weights=np.asarray(weights[kind.name(layer)][0], np.float32))
            for kind in KINDS
            for layer in range(layers[kind.stack])
        ),
    )


def _text(text: str, *, name: str) -> str:
    if not text.strip():
        raise ValueError(f"{name}: expected text, got {text!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # an argument of the command line that is no UTF-8
        raise ValueError(f"{name}: expected UTF-8, got {text!r}") from error
    return text.strip()


def _check_length(ids: Sequence[int], limit: int, *, name: str) -> None:
    if len(ids) > limit:
        raise ValueError(f"{name}: expected at most {limit} pieces, the end included, got {len(ids)}")


def _greedy(model: Transformer, src: Sequence[int], search: LengthConfig) -> list[int]:
    """The ids themselves: their text may be cut into other pieces than the model wrote."""
    decode = jax.jit(functools.partial(greedy, config=search))
    found = decode(model, jnp.array([src]))
    return np.asarray(found.ids)[0, 0, : int(found.lengths[0, 0])].tolist()


def draw(maps: AttentionMaps, folder: Path) -> list[Path]:
    """Draws a .png for every kind and layer into `folder`, named as in the model; all heads are side by side.

    Raises ValueError where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("expected matplotlib to draw attention; pip install 'twinformer[plot]'") from error
    from matplotlib.figure import Figure

    shown = "".join(piece for side in maps.pieces.values() for piece in side)
    files = []
    with matplotlib.rc_context(_style(shown)):
        for attention in maps.attentions:
            figure = Figure(layout="compressed")
            _fill(figure, attention, queries=maps.pieces[attention.kind.queries], keys=maps.pieces[attention.kind.keys])
            files.append(folder / f"{attention.name}.png")
            figure.savefig(files[-1], dpi=160, bbox_inches="tight")
    return files


def _style(shown: str) -> Any:
    return {
        "axes.edgecolor": "#BBBBBB",
        "axes.linewidth": 0.6,
        "axes.titlesize": 9,
        "font.family": _families(shown),
        "font.size": 9,
        "text.parse_math": False,  # a sentence may hold two dollars
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }


def _families(shown: str) -> list[str]:
    """matplotlib's own font first, then what is installed that has letters which all before it lack."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    families = ["DejaVu Sans"]
    missing = {ord(letter) for letter in shown} - FT2Font(font_manager.findfont(families[0])).get_charmap().keys()
    fonts = font_manager.fontManager.ttflist if missing else []
    # Its last resort draws, for every letter, a box that names the script.
    for font in sorted(fonts, key=lambda font: ("Last Resort" in font.name, font.name, font.fname)):
        if not missing:
            break
        found = missing & FT2Font(font.fname).get_charmap().keys()
        if found and font.name not in families:
            families.append(font.name)
            missing -= found
    return families


def _fill(figure: Any, attention: Attention, *, queries: Sequence[str], keys: Sequence[str]) -> None:
    """A map for every head, up to four in a row; one colour bar, from 0 to 1 in every figure, so that all compare."""
    num_heads = len(attention.weights)
    columns = min(4, num_heads)
    rows = math.ceil(num_heads / columns)
    cell = min(_LARGEST_CELL, _LARGEST_MAP / max(len(queries), len(keys)))
    longest = max(map(len, queries)), max(map(len, keys))
    # Besides the maps: room for labels of that many letters, titles and the colour bar.
    figure.set_size_inches(
        max(columns * (cell * len(keys) + 0.2) + 0.08 * longest[0] + 1.3, 4.5),
        rows * (cell * len(queries) + 0.35) + 0.07 * longest[1] + 0.8,
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    for head, axis in enumerate(axes.flat):
        if head >= num_heads:
            axis.set_axis_off()
            continue
        image = axis.imshow(attention.weights[head], cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
        axis.set_title(f"head {head}")
        _label(axis.xaxis, keys if head + columns >= num_heads else [], cell=cell, rotation=90)
        _label(axis.yaxis, queries if head % columns == 0 else [], cell=cell, rotation=0)
    figure.colorbar(image, ax=axes, label="weight", fraction=0.05, pad=0.01).outline.set_visible(False)
    figure.suptitle(f"{attention.kind.title}, layer {attention.layer}", fontsize=12, fontweight="bold")
    figure.supxlabel(f"{attention.kind.keys} piece that is attended to", fontsize=9, color=_GREY)
    figure.supylabel(f"{attention.kind.queries} piece that attends", fontsize=9, color=_GREY)


def _label(axis: Any, pieces: Sequence[str], *, cell: float, rotation: int) -> None:
    """The pieces, or every so many-th where there is no room for more."""
    size = min(_LARGEST_FONT, cell * 72 * 0.75)
    every = math.ceil(_SMALLEST_FONT / size)
    # The end of a label is at its tick, and its letters stand in the middle of the cell, whichever they are.
    place = {"rotation": rotation, "rotation_mode": "anchor", "ha": "right", "va": "center_baseline"}
    axis.set_ticks(range(0, len(pieces), every), pieces[::every], fontsize=max(size, _SMALLEST_FONT), **place)
