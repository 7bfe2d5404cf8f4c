"""Text as ids: in memory and on disk the same, whole or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest

from train import sentences
from train.bpe import BPETokenizer
from train.config import TokenizerConfig
from train.sentences import EncodedText, Sentences, encode_text, encode_to_disk, read_encoded
from transformer_config.config import EOS_ID

PAIRS = [("ein Hund", "a dog"), ("", "<eos>"), ("zwei Katzen", "two cats"), ("drei", "three")]


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return BPETokenizer.train([text for pair in PAIRS for text in pair], TokenizerConfig(vocab_size=270))


def rows(side: Sentences) -> list[list[int]]:
    return [row.tolist() for row in side]


def test_rows_of_lists_and_some_of_them() -> None:
    lists = [[3, 4], [], [5], [6, 7, 8]]
    side = Sentences.of(lists)
    assert rows(side) == lists
    assert side.lengths.tolist() == [2, 0, 1, 3]
    assert rows(side.take([3, 0, 3])) == [[6, 7, 8], [3, 4], [6, 7, 8]]
    assert side.take([3, 0]).pieces is side.pieces, "nothing is copied"


def test_sentences_end_with_eos_and_spell_their_text(tokenizer: BPETokenizer) -> None:
    encoded = encode_text(PAIRS, tokenizer)
    for side, texts in ((encoded.src, [p[0] for p in PAIRS]), (encoded.tgt, [p[1] for p in PAIRS])):
        assert all(row[-1] == EOS_ID and row.count(EOS_ID) == 1 for row in rows(side))
        assert tokenizer.decode(rows(side)) == texts
    assert encoded.lengths[1].tolist() == [1, 6]


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_on_disk_as_in_memory(
    tmp_path: Path, tokenizer: BPETokenizer, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(sentences, "AT_ONCE", at_once)
    counts: list[int] = []
    stored = encode_to_disk(iter(PAIRS), tokenizer, tmp_path / "text", progress=counts.append)
    expected = encode_text(PAIRS, tokenizer)
    assert rows(stored.src) == rows(expected.src)
    assert rows(stored.tgt) == rows(expected.tgt)
    assert (stored.lengths == expected.lengths).all()
    assert isinstance(stored.src.pieces, np.memmap)
    assert stored.src.pieces.dtype == np.uint16
    assert sum(counts) == len(PAIRS)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_what_is_there_is_not_made_again(tmp_path: Path, tokenizer: BPETokenizer) -> None:
    encode_to_disk(PAIRS, tokenizer, tmp_path / "text")

    def never() -> None:
        raise AssertionError("expected the text to be left alone")
        yield

    assert len(encode_to_disk(never(), tokenizer, tmp_path / "text")) == len(PAIRS)


def test_a_text_that_breaks_off_leaves_nothing(tmp_path: Path, tokenizer: BPETokenizer) -> None:
    def broken():
        yield PAIRS[0]
        raise ValueError("line 2 is no UTF-8")

    with pytest.raises(ValueError, match="line 2"):
        encode_to_disk(broken(), tokenizer, tmp_path / "text")
    with pytest.raises(ValueError, match="at least one pair"):
        encode_to_disk([], tokenizer, tmp_path / "text")
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_belong_together_are_named(tmp_path: Path, tokenizer: BPETokenizer) -> None:
    folder = tmp_path / "text"
    encode_to_disk(PAIRS, tokenizer, folder)
    with (folder / "tgt.ids").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(ValueError, match=r"bytes in .*tgt\.ids.*remove"):
        read_encoded(folder)
    (folder / "facts.json").write_text(json.dumps({"dtype": "uint16", "pairs": 3}))
    with pytest.raises(ValueError, match="expected 3 pairs"):
        read_encoded(folder)


def test_sides_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="got 1 and 0"):
        EncodedText(src=Sentences.of([[2]]), tgt=Sentences.of([]))
    with pytest.raises(ValueError, match="got 0 and 0"):
        EncodedText(src=Sentences.of([]), tgt=Sentences.of([]))
