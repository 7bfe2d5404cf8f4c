"""Joint byte-level BPE: one vocabulary for both languages, with every byte in it, so that no text is unknown."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.config import TokenizerConfig
from transformer_config.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID

SPECIAL_PIECES = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID, "<unk>": UNK_ID}


class Tokenizer:
    """Text to piece ids and back, without loss: `decode(encode(lines)) == lines` for any text.

    Ids 0 to 3 are the special pieces of `transformer_config`. Text never becomes one of them, not even the text
    "<eos>": they are put in by whoever makes batches.
    """

    def __init__(self, pieces: tokenizers.Tokenizer) -> None:
        # A saved file lacks this switch. Without it, text that spells "<eos>" would end a sentence.
        pieces.encode_special_tokens = True
        self._pieces = pieces

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> "Tokenizer":
        """Learn the pieces of `lines` (both languages together). The same lines and config give the same pieces."""
        pieces = tokenizers.Tokenizer(models.BPE())
        # The expression behind ByteLevel parts letters, digits and signs, so no piece can spell "<eos>" either.
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        pieces.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])
            if config.split_digits
            else bytes_of_words
        )
        pieces.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=sorted(SPECIAL_PIECES, key=SPECIAL_PIECES.__getitem__),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        pieces.train_from_iterator(lines, trainer=trainer)
        _check_special_pieces(pieces, "the trained tokenizer")
        return cls(pieces)

    @property
    def size(self) -> int:
        """Number of pieces, special ones included."""
        return self._pieces.get_vocab_size()

    @property
    def sha256(self) -> str:
        """Of all that it does."""
        return hashlib.sha256(self._pieces.to_str().encode()).hexdigest()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Piece ids of each line, with neither BOS nor EOS."""
        return [encoding.ids for encoding in self._pieces.encode_batch(list(lines), add_special_tokens=False)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text that each row of ids spells up to its first EOS. Special ids are skipped, and bytes that make no
        UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary.
        """
        return self._pieces.decode_batch([self._text_ids(row) for row in ids], skip_special_tokens=False)

    def _text_ids(self, row: Sequence[int]) -> list[int]:
        kept: list[int] = []
        for item in row:
            piece = int(item)  # numpy and jax integers too
            if not 0 <= piece < self.size:
                raise ValueError(f"expected piece ids in [0, {self.size}), got {piece}")
            if piece == EOS_ID:
                break
            if piece not in (PAD_ID, BOS_ID, UNK_ID):
                kept.append(piece)
        return kept

    def to_json(self) -> str:
        """All of it, as `save` writes it."""
        return self._pieces.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write one JSON file, at once: a process that is killed here leaves the old file or the new one, no half."""
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(self.to_json(), encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """The tokenizer that `save` wrote to `path`.

        Raises FileNotFoundError when there is no such file, ValueError when it holds no tokenizer or one of another
        kind, with other special ids or without byte-level pieces. Each names the file.
        """
        if not path.is_file():
            raise FileNotFoundError(f"expected a tokenizer in {path}, got no such file")
        try:
            pieces = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise ValueError(f"expected a tokenizer in {path}, got a file that holds none ({error})") from error
        _check_special_pieces(pieces, str(path))
        if not isinstance(pieces.decoder, decoders.ByteLevel) or not isinstance(pieces.model, models.BPE):
            raise ValueError(f"expected a byte-level BPE tokenizer in {path}, got one of another kind")
        return cls(pieces)


def _check_special_pieces(pieces: tokenizers.Tokenizer, where: str) -> None:
    found = {piece: pieces.token_to_id(piece) for piece in SPECIAL_PIECES}
    if found != SPECIAL_PIECES:
        raise ValueError(f"expected special pieces {SPECIAL_PIECES} in {where}, got {found}")
