"""The tokenizer that an imported model came with, through `transformers`: Marian, FSMT, M2M100 and NLLB have their own.

Its files travel inside the one file that a run keeps its tokenizer in. Nothing is downloaded, and no code of theirs is
run.
"""

import base64
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.tokenizer import SPACE, Side, Tokenizer

KIND = "transformers"
"""What the file says of itself."""
WORD_START = "▁"
"""SentencePiece's space."""


class TransformersTokenizer(Tokenizer):
    """What `AutoTokenizer` makes of these files.

    Targets are what `text_target` gives, which `transformers` trains on as labels; the decoder reads `bos_id` before
    them. FSMT's class encodes sources alone: for its targets the same files are read with the languages changed about.
    """

    def __init__(
        self, files: dict[str, bytes], *, languages: tuple[str, str] | None, pad_id: int, bos_id: int, eos_id: int
    ) -> None:
        """Raises ValueError for files that make no tokenizer, and where `transformers` is not installed."""
        self._files, self._languages = files, languages
        self.pad_id, self.bos_id, self.eos_id = pad_id, bos_id, eos_id
        with _unpacked(files) as folder:
            self._tokenizer = _read(folder, languages)
            self._reversed = _reversed(self._tokenizer, folder)
        tags = getattr(self._tokenizer, "lang_token_to_id", {})
        vocabularies = (self._tokenizer.get_vocab(), _target_vocabulary(self._tokenizer), tags)
        self._target_ids = {*vocabularies[1].values(), *tags.values()}
        self._size = 1 + max(id_ for vocabulary in vocabularies for id_ in vocabulary.values())
        self._check_special_ids()

    @classmethod
    def of_folder(
        cls, folder: Path, *, languages: tuple[str, str] | None, pad_id: int, bos_id: int, eos_id: int
    ) -> "TransformersTokenizer":
        """The one in a model's folder. `languages` are source and target, where the model has more than two.

        Raises ValueError that names the folder if there is none, or the model needs languages and none are given.
        """
        try:
            tokenizer = _read(folder, languages)
            with tempfile.TemporaryDirectory() as saved:
                tokenizer.save_pretrained(saved)
                files = {path.name: path.read_bytes() for path in sorted(Path(saved).iterdir())}
        except (OSError, KeyError, TypeError, AssertionError) as error:  # its ways of saying that a file is missing
            if languages is not None and isinstance(error, KeyError) and error.args[0] in languages:
                message = f"{folder}: --languages: expected languages of its tokenizer, got {error.args[0]!r}"
                raise ValueError(message) from error
            raise ValueError(f"{folder}: expected a tokenizer that transformers reads, got {error!r}") from error
        found = cls(files, languages=languages, pad_id=pad_id, bos_id=bos_id, eos_id=eos_id)
        found._check_languages(folder)
        return found

    @classmethod
    def from_json(cls, text: str) -> "TransformersTokenizer":
        """The inverse of `to_json`. Raises ValueError for text that is something else."""
        try:
            values = json.loads(text)
            files = _files(values)
            special = {name: int(values[name]) for name in ("pad_id", "bos_id", "eos_id")}
            languages = values["languages"] and (str(values["languages"][0]), str(values["languages"][1]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"expected the files of a tokenizer, got {error!r}") from error
        return cls(files, languages=languages, **special)

    @property
    def size(self) -> int:
        """Every id is below it."""
        return self._size

    @property
    def languages(self) -> tuple[str, str] | None:
        """Source and target, where they are known."""
        return self._languages or self._own_languages

    @property
    def _own_languages(self) -> tuple[str, str] | None:
        for names in (("source_lang", "target_lang"), ("src_lang", "tgt_lang")):
            source, target = (getattr(self._tokenizer, name, None) for name in names)
            if source is not None and target is not None:
                return str(source), str(target)
        return None

    @property
    def has_language_tags(self) -> bool:
        """Whether ids begin with the tag of their language."""
        return len(self.encode_sources([""])[0]) > 1

    @property
    def first_id(self) -> int | None:
        """What every target begins with: the tag of its language, if there are tags."""
        empty = self.encode_targets([""])[0]
        return empty[0] if len(empty) > 1 else None

    def encode_sources(self, lines: Sequence[str]) -> list[list[int]]:
        """As the tokenizer says it."""
        return [list(ids) for ids in self._tokenizer(list(lines)).input_ids]

    def encode_targets(self, lines: Sequence[str]) -> list[list[int]]:
        """As labels."""
        if self._reversed is not None:
            return [list(ids) for ids in self._reversed(list(lines)).input_ids]
        return [list(ids) for ids in self._tokenizer(text_target=list(lines)).input_ids]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """As `batch_decode` of `transformers`, special ids left out. Ids that only the model has are unknown words."""
        rows = [self._up_to_the_end(row) for row in ids]
        return [str(text) for text in self._tokenizer.batch_decode(rows, skip_special_tokens=True)]

    def readable(self, ids: Sequence[int], side: Side) -> tuple[str, ...]:
        """Pieces as its vocabulary has them, with a visible space."""
        vocabulary = self._tokenizer.get_vocab() if side == "source" else _target_vocabulary(self._tokenizer)
        names = {id_: piece for piece, id_ in vocabulary.items()}
        return tuple(names.get(id_, f"<{id_}>").replace(WORD_START, SPACE) for id_ in ids)

    def to_json(self) -> str:
        """The files in base64, and what is said besides."""
        values = {
            "kind": KIND,
            "languages": self._languages,
            **{name: getattr(self, name) for name in ("pad_id", "bos_id", "eos_id")},
            "files": {name: base64.b64encode(data).decode() for name, data in self._files.items()},
        }
        return json.dumps(values, indent=1) + "\n"

    def _up_to_the_end(self, row: Sequence[int]) -> list[int]:
        kept: list[int] = []
        for id_ in map(int, row):
            if id_ < 0:
                raise ValueError(f"expected piece ids of at least 0, got {id_}")
            if id_ == self.eos_id:
                break
            kept.append(id_ if id_ in self._target_ids else self._tokenizer.unk_token_id)
        return kept

    def _check_languages(self, folder: Path) -> None:
        if not self.has_language_tags:
            own = self._own_languages
            if self._languages is not None and own is not None and self._languages != own:
                raise ValueError(f"{folder}: --languages: expected none, or its own {own}, got {self._languages}")
            return
        if self._languages is None:
            raise ValueError(f"{folder}: expected --languages SOURCE TARGET, for a tokenizer with tags of languages")
        try:
            tags = [self.encode_sources([""])[0][0], self.encode_targets([""])[0][0]]
        except KeyError:  # M2M100's way of saying it
            tags = [self._tokenizer.unk_token_id]
        if self._tokenizer.unk_token_id in tags:
            raise ValueError(f"{folder}: --languages: expected languages of its tokenizer, got {self._languages}")

    def _check_special_ids(self) -> None:
        if getattr(self._tokenizer, "legacy_behaviour", False):
            raise ValueError("expected a tokenizer with legacy_behaviour=false, whose sentences end with their end")
        for name, found in (("pad_id", self._tokenizer.pad_token_id), ("eos_id", self.encode_sources([""])[0][-1])):
            if found != getattr(self, name):
                raise ValueError(f"expected a tokenizer with the model's {name}={getattr(self, name)}, got {found}")


def files_of(path: Path) -> dict[str, bytes]:
    """The tokenizer's files in a run's tokenizer file, without making a tokenizer of them; none of one of ours.

    Raises ValueError that names the file if it is damaged.
    """
    text = path.read_text(encoding="utf-8")
    if not is_transformers(text):
        return {}
    try:
        return _files(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected the files of a tokenizer, got {error!r}") from error


def _files(values: Any) -> dict[str, bytes]:
    files = {name: base64.b64decode(data, validate=True) for name, data in values["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"expected names of files, got {name!r}")
    return files


def is_transformers(text: str) -> bool:
    """Whether the text of a run's tokenizer file holds one of these."""
    return text.startswith("{") and f'"kind": "{KIND}"' in text[:100]


def _read(folder: Path, languages: tuple[str, str] | None) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ValueError(f"expected transformers for this tokenizer ({error}); pip install {EXTRA}") from error
    named = {} if languages is None else dict(zip(("src_lang", "tgt_lang"), languages, strict=True))
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **named)
    except ImportError as error:
        raise ValueError(f"{folder}: expected what its tokenizer needs: pip install {EXTRA} ({error})") from error


EXTRA = "'twinformer[transformers]'"


def _reversed(tokenizer: Any, folder: Path) -> Any:
    """FSMT's, from the target's language into the source's; None of others."""
    if type(tokenizer).__name__ != "FSMTTokenizer":
        return None
    return type(tokenizer)(
        langs=[tokenizer.tgt_lang, tokenizer.src_lang],
        src_vocab_file=str(folder / "vocab-tgt.json"),
        tgt_vocab_file=str(folder / "vocab-src.json"),
        merges_file=str(folder / "merges.txt"),
        do_lower_case=tokenizer.do_lower_case,
    )


def _target_vocabulary(tokenizer: Any) -> dict[str, int]:
    """Of Marian with two vocabularies and of FSMT; that of the source otherwise."""
    if type(tokenizer).__name__ == "FSMTTokenizer":
        return {piece: id_ for id_, piece in tokenizer.decoder.items()}
    if getattr(tokenizer, "separate_vocabs", False):
        return dict(tokenizer.target_encoder)
    return dict(tokenizer.get_vocab())


@contextlib.contextmanager
def _unpacked(files: dict[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        yield Path(folder)
