"""A trained model in the hands of `transformers`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from parity.twins_proof import sinusoids
from parity.weights.foreign import Model
from parity.weights.formats import FORMATS
from parity.weights.models import write_model
from transformer_config import TransformerConfig

M2M100 = {"positions": "concatenated_half_minus_1", "positions_skip_padding": True}


def transformers_model(config: TransformerConfig, weights: Mapping[str, np.ndarray], folder: Path) -> torch.nn.Module:
    """A model of `transformers` with these weights (by the names of the torch reference), written into a new folder.

    Marian where norms come after. M2M100 where they come first: the class computes other positions than ours, and is
    given ours in their place. Raises FieldError for a model that is neither.
    """
    from transformers import M2M100ForConditionalGeneration, MarianMTModel

    post = config.norm_order == "post"
    theirs = config if post else config.replace(**M2M100, position_offset=config.pad_id + 1)
    model = Model(format_=FORMATS["torch-reference"], config=theirs, weights=weights, stored=weights)
    write_model(model, folder, "marian" if post else "m2m_100", source=folder, sinusoids=sinusoids)
    loaded = (MarianMTModel if post else M2M100ForConditionalGeneration).from_pretrained(folder, dtype=torch.float32)
    if not post:
        table = torch.tensor(sinusoids(config, config.max_len), dtype=torch.float32)
        for stack in (loaded.model.encoder, loaded.model.decoder):
            # Rows are counted from the one after padding's.
            stack.embed_positions.weights[theirs.position_offset : theirs.position_offset + len(table)] = table
    return loaded.eval()
