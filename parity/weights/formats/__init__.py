"""Foreign layouts of weights, one file each; see `Format`."""

from parity.weights.formats.ctranslate2 import CTranslate2
from parity.weights.formats.fairseq import Fairseq
from parity.weights.formats.fields import FieldError, Fields
from parity.weights.formats.format import Format
from parity.weights.formats.fsmt import Fsmt
from parity.weights.formats.m2m100 import M2M100
from parity.weights.formats.marian import Marian
from parity.weights.formats.ours import OURS
from parity.weights.formats.state_dict import StateDict
from parity.weights.formats.tutorials import STATE_DICTS

__all__ = ["FORMATS", "FieldError", "Fields", "Format", "StateDict"]

FORMATS: dict[str, Format] = {
    format_.name: format_ for format_ in (*OURS, Marian(), Fsmt(), M2M100(), Fairseq(), CTranslate2(), *STATE_DICTS)
}
"""By name."""
