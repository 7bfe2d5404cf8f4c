"""Joint byte-level BPE: one vocabulary for both languages, with every byte in it, so that no text is unknown."""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.config import TokenizerConfig
from train.tokenizer import SPACE, Side, Tokenizer
from transformer_config.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID

SPECIAL_PIECES = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID, "<unk>": UNK_ID}


class BPETokenizer(Tokenizer):
    """Text to piece ids and back, without loss: `decode(encode(lines)) == lines` for any text.

    Ids 0 to 3 are the special pieces of `transformer_config`. Text never becomes one of them, not even the text
    "<eos>": they are put in by whoever makes batches.
    """

    pad_id, bos_id, eos_id = PAD_ID, BOS_ID, EOS_ID

    def __init__(self, pieces: tokenizers.Tokenizer) -> None:
        # A saved file lacks this switch. Without it, text that spells "<eos>" would end a sentence.
        pieces.encode_special_tokens = True
        self._pieces = pieces

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> "BPETokenizer":
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

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Piece ids of each line, with neither BOS nor EOS."""
        return [encoding.ids for encoding in self._pieces.encode_batch(list(lines), add_special_tokens=False)]

    def encode_sources(self, lines: Sequence[str]) -> list[list[int]]:
        """Pieces, and EOS."""
        return [[*ids, EOS_ID] for ids in self.encode(lines)]

    def encode_targets(self, lines: Sequence[str]) -> list[list[int]]:
        """Likewise: both languages have one vocabulary."""
        return self.encode_sources(lines)

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

    def readable(self, ids: Sequence[int], side: Side) -> tuple[str, ...]:
        """Such as `<bos>`, `␣the`, `ön`, `<0xC3>` for a part of a character."""
        special = {piece_id: piece for piece, piece_id in SPECIAL_PIECES.items()}
        vocabulary = {piece_id: piece for piece, piece_id in json.loads(self.to_json())["model"]["vocab"].items()}
        return tuple(special.get(i) or _readable(bytes(map(_byte_of_letter().__getitem__, vocabulary[i]))) for i in ids)

    def to_json(self) -> str:
        """As the library `tokenizers` writes it."""
        return self._pieces.to_str(pretty=True)

    @classmethod
    def load(cls, path: Path) -> "BPETokenizer":
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


def _readable(piece: bytes) -> str:
    shown = []
    for letter in piece.decode("utf-8", "surrogateescape"):
        if letter == " ":
            shown.append(SPACE)
        elif "\udc80" <= letter <= "\udcff":  # a byte that makes no UTF-8
            shown.append(f"<0x{ord(letter) - 0xDC00:02X}>")
        else:
            shown.append(letter if letter.isprintable() else f"<U+{ord(letter):04X}>")
    return "".join(shown)


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes every byte as a letter: itself where Latin-1 shows it, else the next from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(unseen)}
