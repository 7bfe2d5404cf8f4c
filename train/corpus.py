"""Parallel text: line i of the source translates into line i of the target. Read from files, or built."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from train.config import CorpusConfig

UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class ParallelText:
    """Sentences and their translations, equally many and at least one; else ValueError."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(
                f"expected as many target as source sentences, got {len(self.source)} source and "
                f"{len(self.target)} target sentences"
            )
        if not self.source:
            raise ValueError("expected at least one pair of sentences, got none")

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The three splits of one parallel text, and what a reader of the results should know about them."""

    train: ParallelText
    validation: ParallelText
    test: ParallelText
    notes: tuple[str, ...] = ()
    """Remarks to report, one sentence each, such as how many training pairs were left out and why."""


def load_corpus(config: CorpusConfig) -> Corpus:
    """The corpus that `config` describes.

    Raises FileNotFoundError for a missing file and ValueError for one that cannot be used; either names the file.
    """
    if config.kind == "demo":
        from train.demo_corpus import build_demo_corpus  # the CLDR tables are not needed for files

        return build_demo_corpus(config)
    return _load_files(config)


def _load_files(config: CorpusConfig) -> Corpus:
    notes: list[str] = []
    whole = _load_split(config, config.train_split)
    kept = [pair for pair in zip(whole.source, whole.target, strict=True) if all(side.strip() for side in pair)]
    if not kept:
        raise ValueError(
            f"expected training pairs with words on both sides, "
            f"got none in split {config.train_split!r} of {config.path}"
        )
    if len(kept) < len(whole):
        notes.append(
            f"{config.train_split}: {len(whole) - len(kept)} of {len(whole)} pairs dropped, one side being empty"
        )
    held_out = []
    for split in (config.validation_split, config.test_split):
        text = _load_split(config, split)
        # Held-out pairs are never dropped: every sentence is to be scored exactly once, the odd ones too.
        empty = sum(
            not (source.strip() and target.strip()) for source, target in zip(text.source, text.target, strict=True)
        )
        if empty:
            notes.append(f"{split}: {empty} of {len(text)} pairs have an empty side; kept and scored")
        held_out.append(text)
    train = ParallelText(source=tuple(pair[0] for pair in kept), target=tuple(pair[1] for pair in kept))
    return Corpus(train=train, validation=held_out[0], test=held_out[1], notes=tuple(notes))


def _load_split(config: CorpusConfig, split: str) -> ParallelText:
    if config.path is None:  # refused by CorpusConfig already
        raise ValueError("expected a folder in corpus.path, got None")
    source_file = _find_file(config.path, split=split, language=config.source_language)
    target_file = _find_file(config.path, split=split, language=config.target_language)
    source, target = read_lines(source_file), read_lines(target_file)
    if len(source) != len(target):
        raise ValueError(
            f"expected files of equally many lines, "
            f"got {len(source)} in {source_file} and {len(target)} in {target_file}"
        )
    return ParallelText(source=source, target=target)


def _find_file(folder: Path, *, split: str, language: str) -> Path:
    """`<split>.<language>`, or the same with .gz; the plain file where both exist."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected a folder with {split}.{language} in corpus.path, got {folder}: no such folder"
        )
    candidates = [folder / f"{split}.{language}", folder / f"{split}.{language}.gz"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = " or ".join(candidate.name for candidate in candidates)
    names = sorted(entry.name for entry in folder.iterdir())
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    raise FileNotFoundError(f"expected {tried} in {folder}, which holds {listed or 'nothing'}")


def read_lines(path: Path) -> tuple[str, ...]:
    r"""The lines of a UTF-8 file, which may be gzipped (.gz), without their ends and without a byte-order mark.

    Lines end with "\n" or "\r\n" and nowhere else: `str.splitlines` would also split at U+2028, U+0085 or a form
    feed inside a sentence, and so shift every later line against the other language.

    Raises ValueError that names the file when it is empty, no whole gzip file or no UTF-8 (then with the line).
    """
    data = _read_bytes(path).removeprefix(UTF8_BOM)
    if not data:
        raise ValueError(f"expected lines of text in {path}, got an empty file")
    raw_lines = data.removesuffix(b"\n").split(b"\n")
    lines = []
    for number, raw in enumerate(raw_lines, start=1):
        try:
            lines.append(raw.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"expected UTF-8 in {path}, "
                f"got {raw[error.start : error.end]!r} in line {number}, byte {error.start + 1}"
            ) from error
    return tuple(lines)


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"expected a whole gzip file in {path}, got a truncated or damaged one ({error})") from error
