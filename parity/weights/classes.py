"""The classes of other libraries, where they are installed: what a folder's own class makes of it."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from parity.weights.foreign import read_json

Precision = Literal["float64", "float32"]

_CLASSES = {
    "marian": "MarianMTModel",
    "fsmt": "FSMTForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
}
"""By format, out of `transformers`."""


def has_class(format_name: str) -> bool:
    """Whether this format has a class of its own, and it is installed."""
    installed = all(importlib.util.find_spec(package) is not None for package in ("transformers", "torch"))
    return format_name in _CLASSES and installed


def logits_of_the_class(
    folder: Path, src: np.ndarray, tgt_in: np.ndarray, *, precision: Precision, pad_id: int
) -> np.ndarray:
    """What the folder's own class computes: (batch, tgt_len, tgt_vocab). Nothing is looked for outside the folder."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    kind = read_json(folder / "config.json")["model_type"]
    model_class: Any = getattr(transformers, _CLASSES[kind])
    with _quiet():
        model = model_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model = model.to(getattr(torch, precision))
    ids = torch.from_numpy(src.astype(np.int64))
    with torch.inference_mode(), _masks_of_fsmt():
        output = model(
            input_ids=ids,
            attention_mask=(ids != pad_id).long(),
            decoder_input_ids=torch.from_numpy(tgt_in.astype(np.int64)),
            use_cache=False,
        )
    logits: np.ndarray = output.logits.numpy()
    return logits


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and advice."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


@contextlib.contextmanager
def _masks_of_fsmt() -> Iterator[None]:
    """FSMT makes its mask in float32 whatever it computes in, and fails in float64 (transformers 5.24)."""
    import torch
    from transformers.models.fsmt import modeling_fsmt

    broken = modeling_fsmt.fill_with_neg_inf
    modeling_fsmt.fill_with_neg_inf = lambda zeros: zeros.fill_(torch.finfo(zeros.dtype).min)
    try:
        yield
    finally:
        modeling_fsmt.fill_with_neg_inf = broken
