"""The attention of one sentence as a folder: figures, and one HTML page that opens offline, with nothing fetched."""

import os
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from train.attention_maps import KINDS, AttentionMaps, attention_maps, draw
from train.translate import load_run

PAGE = "attention.html"
SCALE = 10_000
"""The page holds weights as whole numbers of this fraction: short, and fine enough to read."""


def write_attention(run: Path, sentence: str, *, translation: str | None = None, output: Path | None = None) -> Path:
    """Writes figures and page of a run's newest checkpoint into the folder `output`, by default `attention` in `run`.

    Returns the page. Raises FileExistsError if the folder exists; otherwise as `load_run`, `attention_maps` and `draw`.
    """
    output = run / "attention" if output is None else output
    if output.exists():
        raise FileExistsError(f"{output}: expected a folder that does not exist yet")
    maps = attention_maps(load_run(run), sentence, translation=translation)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target and renamed when whole. The folder in the temporary one has the usual permissions.
    with tempfile.TemporaryDirectory(prefix=f"{output.name}.", suffix=".partial", dir=output.parent) as beside:
        folder = Path(beside) / output.name
        folder.mkdir()
        draw(maps, folder)
        (folder / PAGE).write_text(to_html(maps), encoding="utf-8")
        os.rename(folder, output)
    return output / PAGE


def to_html(maps: AttentionMaps) -> str:
    """The page. Whatever the sentence, the translation and the pieces hold is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("train"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Compact; the filter escapes what could end the script that the data stands in.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    kinds = [(kind, [attention for attention in maps.attentions if attention.kind == kind]) for kind in KINDS]
    return environment.get_template("attention.html.jinja").render(maps=maps, kinds=kinds, data=_data(maps))


def _data(maps: AttentionMaps) -> dict[str, Any]:
    """What the page's script reads."""
    return {
        "scale": SCALE,
        "pieces": {side: list(pieces) for side, pieces in maps.pieces.items()},
        "predicted": list(maps.predicted),
        "attentions": [
            {
                "name": attention.name,
                "title": attention.kind.title,
                "layer": attention.layer,
                "queries": attention.kind.queries,
                "keys": attention.kind.keys,
                "weights": np.rint(attention.weights * SCALE).astype(int).tolist(),
            }
            for attention in maps.attentions
        ],
    }
