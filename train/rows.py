"""Sentences written into the rows of arrays, all of a batch at once: index arithmetic in the place of a loop."""

import numpy as np
from jaxtyping import Int32, Int64

from train.sentences import EncodedText, Sentences


def spans(starts: Int64[np.ndarray, "spans"], lengths: Int64[np.ndarray, "spans"]) -> Int64[np.ndarray, "indices"]:
    """The indices `start, start + 1, ..., start + length - 1` of one span after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)


def starts_within_rows(
    lengths: Int64[np.ndarray, "spans"], per_row: Int64[np.ndarray, "rows"]
) -> Int64[np.ndarray, "spans"]:
    """Where each span begins in its row, if `per_row` of them stand in a row one after the other."""
    before = np.concatenate([[0], np.cumsum(lengths)])
    first = np.cumsum(per_row) - per_row
    return before[:-1] - np.repeat(before[first], per_row)


def source_rows(
    encoded: EncodedText,
    pairs: Int64[np.ndarray, "pairs"],
    *,
    at: Int64[np.ndarray, "pairs"],
    shape: tuple[int, int],
) -> Int32[np.ndarray, "batch src_len"]:
    """Rows of padding but for the sources of `pairs`, which begin `at` these positions of the flattened rows."""
    positions, pieces = _pieces(encoded.src, pairs, at)
    rows = np.full(shape, encoded.pad_id, dtype=np.int32)
    rows.reshape(-1)[positions] = pieces
    return rows


def target_rows(
    encoded: EncodedText,
    pairs: Int64[np.ndarray, "pairs"],
    *,
    at: Int64[np.ndarray, "pairs"],
    shape: tuple[int, int],
) -> tuple[Int32[np.ndarray, "batch tgt_len"], Int32[np.ndarray, "batch tgt_len"]]:
    """The targets of `pairs` likewise: as the decoder reads them, behind the start, and as it is to predict them."""
    positions, pieces = _pieces(encoded.tgt, pairs, at)
    tgt_in, tgt_out = np.full((2, *shape), encoded.pad_id, dtype=np.int32)
    tgt_out.reshape(-1)[positions] = pieces
    # Every position reads what the one before it predicts; for the first ones that is of another sentence, or of none.
    tgt_in.reshape(-1)[positions] = tgt_out.reshape(-1)[positions - 1]
    tgt_in.reshape(-1)[at] = encoded.bos_id
    return tgt_in, tgt_out


def segment_rows(
    segments: Int64[np.ndarray, "pairs"],
    lengths: Int64[np.ndarray, "pairs"],
    *,
    at: Int64[np.ndarray, "pairs"],
    shape: tuple[int, int],
) -> Int32[np.ndarray, "batch len"]:
    """Rows of 0 but for the number of a segment at each of its positions."""
    rows = np.zeros(shape, dtype=np.int32)
    rows.reshape(-1)[spans(at, lengths)] = np.repeat(segments, lengths)
    return rows


def _pieces(
    sentences: Sentences, chosen: Int64[np.ndarray, "chosen"], at: Int64[np.ndarray, "chosen"]
) -> tuple[Int64[np.ndarray, "pieces"], np.ndarray]:
    """Positions `at` which the chosen sentences are to stand, and their pieces."""
    starts = sentences.starts[chosen]
    lengths = sentences.ends[chosen] - starts
    return spans(at, lengths), sentences.pieces[spans(starts, lengths)]
