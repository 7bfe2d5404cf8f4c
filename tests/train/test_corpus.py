import gzip
from pathlib import Path

import pytest

from train.config import CorpusConfig
from train.corpus import ParallelText, load_corpus

LINES = {"train": 4, "val": 2, "test": 3}


def write_corpus(folder: Path, **replaced: bytes) -> CorpusConfig:
    for split, number in LINES.items():
        for language in ("de", "en"):
            text = "".join(f"{split} {language} {i}\n" for i in range(number)).encode()
            (folder / f"{split}.{language}").write_bytes(replaced.get(f"{split}_{language}", text))
    return CorpusConfig(kind="files", path=folder, test_split="test")


def test_lines_stay_aligned_and_splits_apart(tmp_path: Path) -> None:
    corpus = load_corpus(write_corpus(tmp_path))
    assert list(corpus.train) == [(f"train de {i}", f"train en {i}") for i in range(4)]
    assert len(corpus.train) == 4
    assert corpus.validation.target == ("val en 0", "val en 1")
    assert len(corpus.test) == 3
    assert corpus.notes == ()


def test_gzipped_files_read_like_plain_ones(tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    plain = load_corpus(config)
    pairs = list(plain.train)
    for file in list(tmp_path.iterdir()):
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    zipped = load_corpus(config)
    assert list(zipped.train) == pairs
    assert zipped.train.sha256 == plain.train.sha256
    assert (zipped.validation, zipped.test, zipped.notes) == (plain.validation, plain.test, plain.notes)


def test_the_digest_is_of_what_is_trained_on(tmp_path: Path) -> None:
    digests = [
        load_corpus(write_corpus(tmp_path, **files)).train.sha256
        for files in (
            {},
            {"val_de": b"x\ny\n"},
            {"train_de": b"a\nb\nc\nd\n"},
            {"train_de": b"a\nb\nc\nd\n\n", "train_en": b"".join(b"train en %d\n" % i for i in range(4)) + b"e\n"},
        )
    ]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_training_pairs_with_an_empty_side_are_dropped_and_counted(tmp_path: Path) -> None:
    corpus = load_corpus(write_corpus(tmp_path, train_de=b"a\n\nc\nd\n", train_en=b"A\nB\n \nD\n"))
    assert list(corpus.train) == [("a", "A"), ("d", "D")]
    assert len(corpus.train) == 2
    assert corpus.notes == ("train: 2 of 4 pairs dropped for want of words: 1 in the source, 1 in the target",)


def test_held_out_pairs_are_never_dropped(tmp_path: Path) -> None:
    corpus = load_corpus(write_corpus(tmp_path, test_de=b"a\n\nc\n"))
    assert corpus.test.source == ("a", "", "c")
    assert corpus.notes == ("test: 1 of 3 pairs have an empty side; kept and scored",)


def test_held_out_sentences_that_training_has_seen_are_counted(tmp_path: Path) -> None:
    corpus = load_corpus(
        write_corpus(tmp_path, train_de=b"a\nb\nc\nd\n", train_en=b"A\nB\nC\nD\n", val_de=b"b\nc\n", val_en=b"B\nX\n")
    )
    assert corpus.notes == ("val: 2 of 2 sources stand in the training text too, 1 with the same translation",)


def test_no_usable_training_pair(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got none in .*train\.de, .*train\.en"):
        load_corpus(write_corpus(tmp_path, train_de=b"\n\n\n\n"))


def test_missing_file_is_named_with_what_the_folder_holds(tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    (tmp_path / "val.en").unlink()
    with pytest.raises(FileNotFoundError, match=r"val\.en or val\.en\.gz in .*holds test\.de, test\.en, train\.de"):
        load_corpus(config)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'train'.*nowhere: no folder"):
        load_corpus(CorpusConfig(kind="files", path=tmp_path / "nowhere"))


def test_unequal_line_counts_name_both_files_and_counts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got 2 in .*val\.de and 1 in .*val\.en"):
        load_corpus(write_corpus(tmp_path, val_en=b"one\n"))


def test_held_out_sentences_in_both_splits_are_counted(tmp_path: Path) -> None:
    corpus = load_corpus(write_corpus(tmp_path, val_de=b"neu\nalt\n", test_de=b"alt\nanders\ndritte\n"))
    assert corpus.notes == ("test: 1 of 3 sources stand in val too",)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_empty_file_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"test\.en, got an empty file"):
        load_corpus(write_corpus(tmp_path, test_en=content))


def test_bad_utf8_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"UTF-8 in .*val\.de, got b'\\xfc' in line 2, byte 3"):
        load_corpus(write_corpus(tmp_path, val_de="gut\nfür\n".encode("latin-1").replace(b"f\xfc", b"ff\xfc")))


@pytest.mark.parametrize("damage", ["truncated", "no gzip", "flipped"])
def test_damaged_gzip_is_named(tmp_path: Path, damage: str) -> None:
    config = write_corpus(tmp_path)
    whole = gzip.compress(bytes(range(32, 126)) * 20)
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "no gzip": b"plain text\n",
        "flipped": whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:],
    }
    (tmp_path / "train.en").unlink()
    (tmp_path / "train.en.gz").write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"whole gzip file in .*train\.en\.gz"):
        load_corpus(config)


def test_parallel_text_is_checked() -> None:
    with pytest.raises(ValueError, match="got 2 source and 1 target"):
        ParallelText(source=("a", "b"), target=("A",))
    with pytest.raises(ValueError, match="got none"):
        ParallelText(source=(), target=())


def test_the_demo_corpus_is_built_by_kind() -> None:
    assert len(load_corpus(CorpusConfig(num_pairs=100)).train) == 90
