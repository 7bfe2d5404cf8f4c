import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.bpe import BPETokenizer
from train.config import TokenizerConfig
from transformer_config.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID

LINES = [
    *("der kleine Hund sieht den kleinen Hund", "the small dog sees the small dog"),
    *("am 24. Mai 2024 um 12:45", "on May 24, 2024 at 12:45", "<eos> <pad> <eos> <pad> <unk><unk><bos><bos>"),
]
TOKENIZER = BPETokenizer.train(LINES, TokenizerConfig(vocab_size=320))
DIGITS = BPETokenizer.train(LINES, TokenizerConfig(vocab_size=320, split_digits=True))
SPECIAL_IDS = {PAD_ID, BOS_ID, EOS_ID, UNK_ID}
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text("<>/ebopsdunka 12²٣ \t\n\r")


@given(lines=st.lists(ANY_TEXT, max_size=4))
@pytest.mark.parametrize("tokenizer", [TOKENIZER, DIGITS])
def test_decode_inverts_encode(tokenizer: BPETokenizer, lines: list[str]) -> None:
    assert tokenizer.decode(tokenizer.encode(lines)) == lines


@pytest.mark.parametrize(
    "line", ["<eos>", "a<eos>b", " <pad> ", "<bos><unk>", "  two  spaces ", "", "\ufeff", "e\u0301"]
)
def test_text_never_becomes_a_special_piece(line: str) -> None:
    for tokenizer in (TOKENIZER, DIGITS):
        (ids,) = tokenizer.encode([line])
        assert not SPECIAL_IDS & set(ids)
        assert tokenizer.decode([ids]) == [line]


def test_special_pieces_stand_at_the_shared_ids(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "t.json")
    vocabulary = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert [vocabulary[piece] for piece in ("<pad>", "<bos>", "<eos>", "<unk>")] == [PAD_ID, BOS_ID, EOS_ID, UNK_ID]
    assert len(vocabulary) == TOKENIZER.size <= 320
    assert BPETokenizer.train(["ab"], TokenizerConfig(vocab_size=300)).size == 260


def test_decoding_stops_at_the_end_of_sentence_and_skips_special_ids() -> None:
    (ids,) = TOKENIZER.encode(["the dog"])
    row = [BOS_ID, PAD_ID, *ids[:1], UNK_ID, *ids[1:], EOS_ID, *ids, PAD_ID]
    assert TOKENIZER.decode([row, [EOS_ID, *ids], []]) == ["the dog", "", ""]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for piece in (-1, TOKENIZER.size):
        with pytest.raises(ValueError, match=rf"got {piece}$"):
            TOKENIZER.decode([[piece]])


def test_split_digits_gives_one_piece_a_digit() -> None:
    (ids,) = DIGITS.encode(["2024"])
    assert len(ids) == 4
    assert len(TOKENIZER.encode(["2024"])[0]) < 4


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\nfrom train.config import TokenizerConfig\nfrom train.bpe import BPETokenizer\n"
        "words = [f'{a}{b}{c}' for a in 'abcdefgh' for b in 'aeiou' for c in 'klmnrst']\n"
        "lines = [' '.join(words[i:] + words[:i]) for i in range(40)]\n"
        "BPETokenizer.train(lines, TokenizerConfig(vocab_size=400)).save(pathlib.Path(sys.argv[1]))\n"
    )
    files = []
    for number, parallel in enumerate(("true", "false", "true")):
        files.append(tmp_path / f"{number}.json")
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": parallel, "PYTHONHASHSEED": str(number)}
        root = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-c", script, str(files[-1])], check=True, env=environment, cwd=root)
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()


@pytest.mark.parametrize("tokenizer", [TOKENIZER, DIGITS])
def test_a_loaded_tokenizer_is_the_saved_one(tmp_path: Path, tokenizer: BPETokenizer) -> None:
    lines = [*LINES, "<eos>", "neu 99"]
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = BPETokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(lines) == tokenizer.encode(lines)
    assert loaded.size == tokenizer.size
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        DIGITS.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        BPETokenizer.load(tmp_path / "absent.json")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 3}', b"\xff\xfe"])
def test_a_file_without_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json"):
        BPETokenizer.load(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    TOKENIZER.save(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"half\.json"):
        BPETokenizer.load(path)


def test_foreign_special_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    TOKENIZER.save(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    vocabulary["<eos>"], vocabulary["<bos>"] = vocabulary["<bos>"], vocabulary["<eos>"]
    for token in values["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match=r"special pieces .* in .*foreign\.json, got .*'<bos>': 2"):
        BPETokenizer.load(path)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    TOKENIZER.save(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    values["decoder"] = {"type": "Fuse"}
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match=r"byte-level BPE tokenizer in .*words\.json"):
        BPETokenizer.load(path)
