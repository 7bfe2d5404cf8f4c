"""Pairs of sentences as piece ids: flat arrays, in memory or mapped from files that are made once for a text."""

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from train.readers import Pair
from train.tokenizer import Tokenizer
from transformer_config import BOS_ID, PAD_ID

AT_ONCE = 20_000
"""Pairs that are text and lists of ids in memory at a time; the rest are on disk."""
SIDES = ("src", "tgt")
Indices = Sequence[int] | Int64[np.ndarray, "chosen"]


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Rows of ids, all of them in one flat array."""

    pieces: Integer[np.ndarray, "pieces"]
    starts: Int64[np.ndarray, "sentences"]
    ends: Int64[np.ndarray, "sentences"]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Sentences":
        """Of lists."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        pieces = np.fromiter(itertools.chain.from_iterable(rows), np.int32, count=int(lengths.sum()))
        return cls.one_after_the_other(pieces, lengths)

    @classmethod
    def one_after_the_other(
        cls, pieces: Integer[np.ndarray, "pieces"], lengths: Int64[np.ndarray, "sentences"]
    ) -> "Sentences":
        """Rows of these lengths out of a flat array."""
        ends = np.cumsum(lengths, dtype=np.int64)
        return cls(pieces, ends - lengths, ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> Integer[np.ndarray, "length"]:
        return self.pieces[self.starts[i] : self.ends[i]]

    def __iter__(self) -> Iterator[Integer[np.ndarray, "length"]]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> Int64[np.ndarray, "sentences"]:
        """Ids of each row."""
        return self.ends - self.starts

    def take(self, indices: Indices) -> "Sentences":
        """The rows at `indices`, in that order; their ids stay where they are."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Sentences(self.pieces, self.starts[chosen], self.ends[chosen])


@dataclasses.dataclass(frozen=True)
class EncodedText:
    """Pairs as piece ids. Every sentence ends with EOS, which counts as a piece in all lengths here."""

    src: Sentences
    tgt: Sentences
    pad_id: int = PAD_ID
    """What rows are filled up with."""
    bos_id: int = BOS_ID
    """What the decoder reads before a target."""

    def __post_init__(self) -> None:
        if len(self.src) != len(self.tgt) or not len(self.src):
            raise ValueError(
                f"expected equally many source and target sentences, at least one, "
                f"got {len(self.src)} and {len(self.tgt)}"
            )

    def __len__(self) -> int:
        return len(self.src)

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "pairs 2"]:
        """Source and target length of each pair, in pieces."""
        return np.stack([self.src.lengths, self.tgt.lengths], axis=1)

    def take(self, indices: Indices) -> "EncodedText":
        """The pairs at `indices`, in that order."""
        return dataclasses.replace(self, src=self.src.take(indices), tgt=self.tgt.take(indices))


def encode_text(pairs: Iterable[Pair], tokenizer: Tokenizer) -> EncodedText:
    """In memory: for text that is small."""
    chunks = list(_encoded(pairs, tokenizer))
    src, tgt = (Sentences.of([row for chunk in chunks for row in chunk[side]]) for side in (0, 1))
    return EncodedText(src, tgt, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id)


def encode_to_disk(
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    progress: Callable[[int], None] = lambda count: None,
) -> EncodedText:
    """The text in `folder`, which is made now unless it is there: whole, or not at all.

    `progress` is told how many pairs have been encoded. What is there is trusted: the caller names the folder after
    the text and the tokenizer. Raises ValueError that names the folder if its files do not belong together.
    """
    if not folder.exists():
        beside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            _write(pairs, tokenizer, beside, progress)
            try:
                beside.rename(folder)
            except OSError:
                if not folder.exists():  # else another process has been faster, with the same text
                    raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return read_encoded(folder)


def read_encoded(folder: Path) -> EncodedText:
    """What `encode_to_disk` made, mapped from its files: pages are read when they are asked for."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    lengths = np.load(folder / "lengths.npy")
    sides = []
    for number, side in enumerate(SIDES):
        file = folder / f"{side}.ids"
        of_side = lengths[:, number].astype(np.int64)
        expected = int(of_side.sum()) * np.dtype(facts["dtype"]).itemsize
        if len(lengths) != facts["pairs"] or file.stat().st_size != expected:
            raise ValueError(
                f"expected {facts['pairs']:,} pairs and {expected:,} bytes in {file}, got {len(lengths):,} pairs and "
                f"{file.stat().st_size:,} bytes; remove {folder} to have it made anew"
            )
        sides.append(Sentences.one_after_the_other(np.memmap(file, dtype=facts["dtype"], mode="r"), of_side))
    src, tgt = sides
    return EncodedText(src, tgt, **{name: facts[name] for name in ("pad_id", "bos_id") if name in facts})


def _write(pairs: Iterable[Pair], tokenizer: Tokenizer, folder: Path, progress: Callable[[int], None]) -> None:
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    lengths: list[np.ndarray] = []
    with (folder / "src.ids").open("wb") as src, (folder / "tgt.ids").open("wb") as tgt:
        for chunk in _encoded(pairs, tokenizer):
            for rows, file in zip(chunk, (src, tgt), strict=True):
                file.write(np.fromiter(itertools.chain.from_iterable(rows), dtype).tobytes())
            lengths.append(np.array([[len(row) for row in rows] for rows in chunk], dtype=np.int32).T)
            progress(len(chunk[0]))
    if not lengths:
        raise ValueError("expected at least one pair of sentences, got none")
    every = np.concatenate(lengths)
    np.save(folder / "lengths.npy", every)
    special = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id}
    facts: dict[str, Any] = {"dtype": np.dtype(dtype).name, "pairs": len(every), **special}
    (folder / "facts.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _encoded(pairs: Iterable[Pair], tokenizer: Tokenizer) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Rows of both sides, some at a time. The tokenizer uses every core it is allowed."""
    every = iter(pairs)
    while chunk := list(itertools.islice(every, AT_ONCE)):
        sources, targets = zip(*chunk, strict=True)
        yield tokenizer.encode_sources(sources), tokenizer.encode_targets(targets)
