"""IWSLT's files as they are published: talks as lines between tags for training, as XML for the rest.

`train.tags.de-en.de` has one sentence a line, and between talks lines of markup (<url>, <title>, <speaker>, ...), which
are no training text. `IWSLT16.TED.tst2013.de-en.de.xml` has a <doc> for each talk and a <seg> for each sentence. The
scripts that the hub once ran on them are run no longer, and the archive's links die, so they are read from a folder.
"""

import functools
import re
from collections.abc import Iterator
from html import unescape
from itertools import zip_longest
from pathlib import Path
from xml.etree import ElementTree

from train.readers import Pair, PairSource, read_lines

ENTITY = re.compile(r"&(?:\w+|#\d+|#x[0-9a-fA-F]+);")
TALK = re.compile(r"\s*<talkid>\s*(.*?)\s*</talkid>")


def find_split(folder: Path, split: str, *, source: str, target: str) -> PairSource:
    """`train`, or a held-out set such as `tst2013`.

    The published pair of languages may be named in either order. Raises FileNotFoundError that lists the folder;
    reading raises ValueError that names the file and the talk.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder with IWSLT's files in corpus.path, got {folder}: no folder")
    files = [_find(folder, split, languages=(source, target), language=language) for language in (source, target)]
    tagged = split == "train"
    read = _read_tagged if tagged else _read_xml
    return PairSource(name=split, files=tuple(files), read=functools.partial(read, *files))


def _find(folder: Path, split: str, *, languages: tuple[str, str], language: str) -> Path:
    patterns = []
    for first, second in (languages, languages[::-1]):
        if split == "train":
            patterns.append(f"train.tags.{first}-{second}.{language}")
        else:
            patterns.append(f"IWSLT*.{split}.{first}-{second}.{language}.xml")
    found = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"expected one file of the split {split!r} in {language} in {folder}, found {names}")
    if not found:
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:20])
        raise FileNotFoundError(f"expected {' or '.join(patterns)} in {folder}, which holds {names or 'nothing'}")
    return found[0]


def _read_tagged(source: Path, target: Path) -> Iterator[Pair]:
    """Sentence by sentence, talk by talk: a line too many on one side ends with its talk, as an error."""
    nothing: tuple[str, list[str]] = ("", [])
    for (talk, lines), (other, translations) in zip_longest(_talks(source), _talks(target), fillvalue=nothing):
        if talk != other or len(lines) != len(translations):
            raise ValueError(
                f"expected the same talks in {source} and {target}, got {len(lines)} sentences of talk "
                f"{talk or '(none)'} beside {len(translations)} of {other or '(none)'}"
            )
        yield from zip(lines, translations, strict=True)


def _talks(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(number of the talk, its sentences). A talk begins with the first line of markup behind sentences."""
    talk, sentences = "", []
    for line in read_lines(path):
        if not line.lstrip().startswith("<"):
            sentences.append(_text(line))
            continue
        if sentences:
            yield talk, sentences
            talk, sentences = "", []
        named = TALK.match(line)
        talk = named[1] if named else talk
    if sentences:
        yield talk, sentences


def _read_xml(source: Path, target: Path) -> Iterator[Pair]:
    """Matched by document and segment; a segment that one side lacks is an error, never a shift of the others."""
    ours, theirs = _segments(source), _segments(target)
    lacking = [(key, target) for key in ours if key not in theirs] + [
        (key, source) for key in theirs if key not in ours
    ]
    if lacking:
        (document, segment), path = lacking[0]
        raise ValueError(
            f"expected the same segments in {source} and {target}, got none numbered {segment} of document {document} "
            f"in {path.name} ({len(lacking)} are lacking altogether)"
        )
    for key, text in ours.items():
        yield text, theirs[key]


def _segments(path: Path) -> dict[tuple[str, str], str]:
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"expected XML in {path}, got {error}") from error
    found: dict[tuple[str, str], str] = {}
    for document in root.iter("doc"):
        for segment in document.iter("seg"):
            key = (document.get("docid", ""), segment.get("id", ""))
            if key in found:
                raise ValueError(f"expected every segment once in {path}, got {key[1]} of document {key[0]} twice")
            found[key] = " ".join("".join(segment.itertext()).split())
    if not found:
        raise ValueError(f"expected <doc> with <seg> in {path}, got <{root.tag}> without")
    return found


def _text(line: str) -> str:
    """Without the spaces around it, and with the entities of markup (&amp;) as what they stand for."""
    return ENTITY.sub(lambda entity: unescape(entity[0]), line).strip()
