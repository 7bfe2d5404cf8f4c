"""Pairs of sentences in files, read one after the other: aligned lines, TSV, JSON lines, Parquet; also gzipped."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

Pair = tuple[str, str]
"""A sentence and its translation."""

UTF8_BOM = b"\xef\xbb\xbf"
TRANSLATION = "translation"
"""What the hub's corpora call the field with one sentence for each language."""
PARQUET_ROWS = 10_000
"""Rows of a Parquet file in memory at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource:
    """Pairs that can be read again and again."""

    name: str
    """Of the split, for messages."""
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Pair]]

    def __iter__(self) -> Iterator[Pair]:
        return self.read()


def find_split(folder: Path, split: str, *, source: str, target: str) -> PairSource:
    """The split `train`, say, of a folder: `train.de` beside `train.en`, `train.tsv`, `train.jsonl` or `train.parquet`;
    all but the last may end with .gz.

    A TSV has the source in its first column and the target in its second, or a first line with the languages' names
    over them. JSON lines and Parquet have a field for each language, or one called `translation` that has.

    Raises FileNotFoundError that lists the folder, and ValueError if the split is there in two formats. Reading raises
    ValueError that names the file, the line and what is wrong there.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder with the split {split!r} in corpus.path, got {folder}: no folder")
    sides = [_plain_or_gzipped(folder / f"{split}.{language}") for language in (source, target)]
    found: list[tuple[tuple[Path, ...], Callable[[], Iterator[Pair]]]] = []
    if sides[0] is not None and sides[1] is not None:
        aligned = (sides[0], sides[1])
        found.append((aligned, lambda: read_aligned(*aligned)))
    for suffix, reader in _READERS.items():
        path = folder / f"{split}{suffix}"
        file = path if suffix == ".parquet" and path.is_file() else _plain_or_gzipped(path)
        if file is not None:
            found.append(((file,), _reading(reader, file, source, target)))
    if len(found) > 1:
        names = " and ".join("/".join(file.name for file in files) for files, _ in found)
        raise ValueError(f"expected the split {split!r} once in {folder}, found {names}")
    if not found:
        raise FileNotFoundError(_not_found(folder, split, source, target, sides))
    files, read = found[0]
    return PairSource(name=split, files=files, read=read)


def _reading(reader: "Reader", file: Path, source: str, target: str) -> Callable[[], Iterator[Pair]]:
    return lambda: reader(file, source, target)


def _plain_or_gzipped(path: Path) -> Path | None:
    """The plain file where both exist."""
    candidates = (path, path.with_name(path.name + ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _not_found(folder: Path, split: str, source: str, target: str, sides: list[Path | None]) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    lacking = [f"{split}.{language}" for language, side in zip((source, target), sides, strict=True) if side is None]
    if len(lacking) == 1:
        return f"expected {lacking[0]} or {lacking[0]}.gz in {folder}, which holds {listed}"
    others = ", ".join(f"{split}{suffix}" for suffix in _READERS)
    return (
        f"expected {split}.{source} and {split}.{target} (or {others}) in {folder}, which holds {listed or 'nothing'}"
    )


def read_lines(path: Path) -> Iterator[str]:
    r"""The lines of a UTF-8 file, which may be gzipped (.gz), without their ends and without a byte-order mark.

    Lines end with "\n" or "\r\n" and nowhere else: `str.splitlines` would also split at U+2028, U+0085 or a form
    feed inside a sentence, and so shift every later line against the other language.

    Raises ValueError that names the file when it is empty, no whole gzip file or no UTF-8 (then with the line).
    """
    number = 0
    with _opened(path) as stream:
        for raw in stream:
            line = raw.removeprefix(UTF8_BOM) if number == 0 else raw
            if not line:  # a byte-order mark, and nothing behind it
                break
            number += 1
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"expected UTF-8 in {path}, "
                    f"got {error.object[error.start : error.end]!r} in line {number}, byte {error.start + 1}"
                ) from error
    if number == 0:
        raise ValueError(f"expected lines of text in {path}, got an empty file")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix != ".gz":
        with path.open("rb") as plain:
            yield plain
        return
    try:
        with gzip.open(path) as stream:
            yield stream  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"expected a whole gzip file in {path}, got {type(error).__name__}: {error}") from error


def read_aligned(source: Path, target: Path) -> Iterator[Pair]:
    """Line i of one file with line i of the other. Raises ValueError at the end if one has more lines."""
    sides = (read_lines(source), read_lines(target))
    for before, pair in enumerate(itertools.zip_longest(*sides)):
        if None in pair:
            ours, theirs = (
                before + (line is not None) + sum(1 for _ in side) for line, side in zip(pair, sides, strict=True)
            )
            raise ValueError(f"expected files of equally many lines, got {ours} in {source} and {theirs} in {target}")
        yield pair


def _read_tsv(path: Path, source: str, target: str) -> Iterator[Pair]:
    columns = (0, 1)
    for number, line in enumerate(read_lines(path), start=1):
        fields = line.split("\t")
        if number == 1 and {source, target} <= set(fields):
            columns = (fields.index(source), fields.index(target))
            continue
        if len(fields) <= max(columns):
            raise ValueError(
                f"expected at least {max(columns) + 1} columns in {path}, line {number}, got {len(fields)}"
            )
        yield fields[columns[0]], fields[columns[1]]


def _read_json_lines(path: Path, source: str, target: str) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a JSON object in {where}, got {error}") from error
        yield pair_of(record, source, target, where=where)


def _read_parquet(path: Path, source: str, target: str) -> Iterator[Pair]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(f"expected pyarrow to read {path}; pip install 'twinformer[data]'") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = set(file.schema_arrow.names)
        columns = [TRANSLATION] if TRANSLATION in names else [name for name in (source, target) if name in names]
        number = 0
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield pair_of(record, source, target, where=f"{path}, row {number}")
    except pyarrow.ArrowException as error:
        raise ValueError(f"expected a Parquet file in {path}, got {error}") from error


Reader = Callable[[Path, str, str], Iterator[Pair]]
_READERS: Mapping[str, Reader] = {".tsv": _read_tsv, ".jsonl": _read_json_lines, ".parquet": _read_parquet}


def pair_of(record: Any, source: str, target: str, *, where: str) -> Pair:
    """Out of {"de": ..., "en": ...} or {"translation": {...}}; a null is an empty sentence. Else ValueError."""
    fields = record.get(TRANSLATION, record) if isinstance(record, dict) else record
    if not isinstance(fields, dict) or not {source, target} <= fields.keys():
        got = f"the fields {', '.join(map(str, fields))}" if isinstance(fields, dict) else repr(fields)[:60]
        raise ValueError(f"expected the fields {source!r} and {target!r} in {where}, got {got}")
    pair = tuple("" if fields[name] is None else fields[name] for name in (source, target))
    wrong = next((name for name, text in zip((source, target), pair, strict=True) if not isinstance(text, str)), None)
    if wrong is not None:
        raise ValueError(f"expected text as {wrong!r} in {where}, got {fields[wrong]!r}")
    return pair[0], pair[1]
