"""What the ids of a vocabulary are called, where a file beside the weights says so."""

import base64
import json
from collections.abc import Collection
from pathlib import Path

from parity.weights.checkpoint import StoreError


def piece_names(folder: Path, count: int) -> tuple[str, ...] | None:
    """The pieces of the ids 0 to `count` - 1, which source and target share.

    Out of tokenizer.json, which training runs have, or vocab.json of OPUS-MT. None where there is neither, or not every
    id has a name in it. Raises StoreError for a file that cannot be read.
    """
    named = _ids(folder)
    pieces = {number: piece for piece, number in named.items()}
    return tuple(pieces[number] for number in range(count)) if pieces.keys() >= set(range(count)) else None


def _ids(folder: Path) -> dict[str, int]:
    tokenizer, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    try:
        if tokenizer.is_file():
            files = json.loads(tokenizer.read_bytes()).get("files")
            if isinstance(files, dict):  # an imported model's run: its tokenizer's files are in it
                text = base64.b64decode(files["vocab.json"]) if _of_both(files) else "{}"
                return {str(piece): int(number) for piece, number in json.loads(text).items()}
            import tokenizers

            return dict(tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab())
        if _of_both({path.name for path in folder.iterdir()} if folder.is_dir() else ()):
            return {str(piece): int(number) for piece, number in json.loads(vocabulary.read_bytes()).items()}
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise StoreError(f"{folder}: expected the names of a vocabulary, got a damaged file: {error}") from error
    return {}


def _of_both(files: Collection[str]) -> bool:
    """Whether vocab.json among the files is that of source and target."""
    return "vocab.json" in files and "target_vocab.json" not in files
