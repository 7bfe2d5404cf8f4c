"""Pairs out of every format, and what is wrong with a file, by name and line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from train.readers import find_split, pair_of, read_lines

PAIRS = [("ein Hund", "a dog"), ("zwei\u2028Katzen", "two cats"), ("", "nothing")]


def tsv(folder: Path) -> Path:
    (folder / "train.tsv").write_text("".join(f"{de}\t{en}\tmore\n" for de, en in PAIRS), encoding="utf-8")
    return folder / "train.tsv"


def tsv_with_names(folder: Path) -> Path:
    lines = ["id\ten\tde"] + [f"{i}\t{en}\t{de}" for i, (de, en) in enumerate(PAIRS)]
    (folder / "train.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "train.tsv"


def json_lines(folder: Path) -> Path:
    lines = [json.dumps({"de": de or None, "en": en, "id": 1}) for de, en in PAIRS]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return folder / "train.jsonl"


def json_translations(folder: Path) -> Path:
    lines = [json.dumps({"translation": {"en": en, "de": de}}, ensure_ascii=False) for de, en in PAIRS]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "train.jsonl"


def parquet(folder: Path) -> Path:
    columns = {"en": [en for _, en in PAIRS], "n": [1, 2, 3], "de": [de or None for de, _ in PAIRS]}
    write_table(pyarrow.table(columns), folder / "train.parquet")
    return folder / "train.parquet"


def parquet_translations(folder: Path) -> Path:
    write_table(pyarrow.table({"translation": [{"de": de, "en": en} for de, en in PAIRS]}), folder / "train.parquet")
    return folder / "train.parquet"


FORMATS = [tsv, tsv_with_names, json_lines, json_translations, parquet, parquet_translations]


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_format_gives_its_pairs_again_and_again(tmp_path: Path, write: Callable[[Path], Path], zipped: bool) -> None:
    file = write(tmp_path)
    if zipped and file.suffix == ".parquet":
        pytest.skip("Parquet is compressed by itself")
    if zipped:
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    split = find_split(tmp_path, "train", source="de", target="en")
    assert list(split) == PAIRS
    assert list(split) == PAIRS
    assert [path.name for path in split.files] == [file.name + (".gz" if zipped else "")]


def test_the_languages_say_which_side_is_which(tmp_path: Path) -> None:
    json_lines(tmp_path)
    split = find_split(tmp_path, "train", source="en", target="de")
    assert list(split) == [(en, de) for de, en in PAIRS]


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg"
    file = tmp_path / "odd.de"
    file.write_bytes(f"\ufeff{odd}\r\nplain\r\n\nlast".encode())
    assert list(read_lines(file)) == [odd, "plain", "", "last"]


def test_a_final_newline_adds_no_line_but_an_empty_line_counts(tmp_path: Path) -> None:
    file = tmp_path / "x.de"
    file.write_bytes(b"a\n")
    assert list(read_lines(file)) == ["a"]
    file.write_bytes(b"a\n\n")
    assert list(read_lines(file)) == ["a", ""]


def test_a_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    tsv(tmp_path)
    json_lines(tmp_path)
    with pytest.raises(ValueError, match=r"'train' once in .*, found train\.tsv and train\.jsonl"):
        find_split(tmp_path, "train", source="de", target="en")


def test_a_split_that_is_not_there_says_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "other.txt").touch()
    expected = r"train\.de and train\.en \(or train\.tsv, train\.jsonl, train\.parquet\) in .*holds other\.txt"
    with pytest.raises(FileNotFoundError, match=expected):
        find_split(tmp_path, "train", source="de", target="en")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.tsv", "a\tb\nonly one\n", r"at least 2 columns in .*train\.tsv, line 2, got 1"),
        ("train.jsonl", '{"de": "a", "en": "b"}\n{"de": ', r"JSON object in .*train\.jsonl, line 2"),
        ("train.jsonl", '["a", "b"]\n', r"'de' and 'en' in .*train\.jsonl, line 1, got \['a', 'b'\]"),
        ("train.jsonl", '{"de": "a", "fr": "b"}\n', r"'de' and 'en' in .*line 1, got the fields de, fr"),
        ("train.jsonl", '{"de": "a", "en": 3}\n', r"text as 'en' in .*line 1, got 3"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        list(find_split(tmp_path, "train", source="de", target="en"))


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ValueError, match=r"Parquet file in .*train\.parquet"):
        list(find_split(tmp_path, "train", source="de", target="en"))


@pytest.mark.parametrize("record", [{"de": "a"}, {"translation": "a"}, "a", None])
def test_a_record_without_both_languages(record: Any) -> None:
    with pytest.raises(ValueError, match="'de' and 'en' in row 1"):
        pair_of(record, "de", "en", where="row 1")
