"""IWSLT's published form: made-up talks, exactly their sentences, aligned."""

from pathlib import Path

import pytest

from train.config import CorpusConfig
from train.corpus import load_corpus
from train.iwslt import find_split

TAGS = """<url>http://www.example.org/talks/{talk}</url>
<keywords>talks, {words}</keywords>
<speaker>A. Speaker</speaker>
<talkid>{talk}</talkid>
<title>{title}</title>
<description>TED Talk Subtitles &amp; Transcript: {title}</description>
"""
ENDING = """<reviewer></reviewer>
<translator href="http://www.example.org/p/1">A. Translator</translator>
"""

GERMAN = {"1": [" Guten Morgen. ", "Wie geht es Ihnen? &amp; weiter"], "27": ["Zwei & drei", "", "5 &lt; 6 &copy frei"]}
ENGLISH = {
    "1": ["Good morning.", "How are you? &amp; on "],
    "27": ["Two & three", "Nothing there", "5 &lt; 6 &copy free"],
}
TRAINING = [
    ("Guten Morgen.", "Good morning."),
    ("Wie geht es Ihnen? & weiter", "How are you? & on"),
    ("Zwei & drei", "Two & three"),
    ("", "Nothing there"),
    ("5 < 6 &copy frei", "5 < 6 &copy free"),
]

XML = """<?xml version="1.0" encoding="UTF-8"?>
<mteval>
<{kind} setid="{split}" srclang="german" {target}>
{documents}</{kind}>
</mteval>
"""
DOCUMENT = """<doc docid="{talk}" genre="lectures">
<url>http://www.example.org/talks/{talk}</url>
<keywords>words</keywords>
<title>{talk}: a title</title>
<description>nothing to translate</description>
{segments}</doc>
"""


def write_tags(folder: Path, language: str, talks: dict[str, list[str]]) -> None:
    text = ""
    for talk, sentences in talks.items():
        text += TAGS.format(talk=talk, words=language, title=f"Title {talk}")
        text += "".join(f"{sentence}\n" for sentence in sentences) + ENDING
    (folder / f"train.tags.de-en.{language}").write_text(text, encoding="utf-8")


def write_xml(folder: Path, split: str, language: str, talks: dict[str, dict[str, str]]) -> None:
    documents = ""
    for talk, segments in talks.items():
        lines = "".join(f'<seg id="{number}">{text}</seg>\n' for number, text in segments.items())
        documents += DOCUMENT.format(talk=talk, segments=lines)
    kind, target = ("srcset", "") if language == "de" else ("refset", 'trglang="english" refid="r"')
    text = XML.format(kind=kind, split=split, target=target, documents=documents)
    (folder / f"IWSLT16.TED.{split}.de-en.{language}.xml").write_text(text, encoding="utf-8")


SEGMENTS = {
    "de": {"535": {"1": " Er &amp; sie. ", "2": "Zwei\nZeilen"}, "7": {"1": "Drei"}},
    "en": {"535": {"1": "He &amp; she.", "2": "Two lines"}, "7": {"1": " Three "}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tags(tmp_path, "de", GERMAN)
    write_tags(tmp_path, "en", ENGLISH)
    for split in ("tst2012", "tst2013"):
        for language, talks in SEGMENTS.items():
            write_xml(tmp_path, split, language, talks)
    return tmp_path


def test_exactly_the_sentences_of_the_training_talks(folder: Path) -> None:
    assert list(find_split(folder, "train", source="de", target="en")) == TRAINING


def test_exactly_the_segments_of_a_held_out_set(folder: Path) -> None:
    expected = [("Er & sie.", "He & she."), ("Zwei Zeilen", "Two lines"), ("Drei", "Three")]
    assert list(find_split(folder, "tst2013", source="de", target="en")) == expected


def test_the_other_direction_reads_the_same_files(folder: Path) -> None:
    assert list(find_split(folder, "train", source="en", target="de")) == [(en, de) for de, en in TRAINING]
    split = find_split(folder, "tst2013", source="en", target="de")
    assert [path.name for path in split.files] == [f"IWSLT16.TED.tst2013.de-en.{x}.xml" for x in ("en", "de")]


def test_as_a_corpus(folder: Path) -> None:
    corpus = load_corpus(CorpusConfig(kind="iwslt", path=folder, validation_split="tst2012", test_split="tst2013"))
    assert list(corpus.train) == [pair for pair in TRAINING if pair[0]]
    assert corpus.notes[0] == "train: 1 of 5 pairs dropped for want of words: 1 in the source"
    assert len(corpus.test) == 3


def test_a_talk_with_a_sentence_too_many_is_named(folder: Path) -> None:
    write_tags(folder, "en", {**ENGLISH, "1": [*ENGLISH["1"], "And more."]})
    with pytest.raises(ValueError, match="got 2 sentences of talk 1 beside 3 of 1"):
        list(find_split(folder, "train", source="de", target="en"))
    write_tags(folder, "en", {"1": ENGLISH["1"]})
    with pytest.raises(ValueError, match=r"got 3 sentences of talk 27 beside 0 of \(none\)"):
        list(find_split(folder, "train", source="de", target="en"))


def test_a_segment_that_one_side_lacks_is_named(folder: Path) -> None:
    write_xml(folder, "tst2013", "en", {"535": SEGMENTS["en"]["535"]})
    with pytest.raises(ValueError, match=r"none numbered 1 of document 7 in IWSLT16\.TED\.tst2013\.de-en\.en\.xml"):
        list(find_split(folder, "tst2013", source="de", target="en"))


def test_broken_and_missing_files_are_named(folder: Path) -> None:
    (folder / "IWSLT16.TED.tst2013.de-en.de.xml").write_text("<mteval><doc>", encoding="utf-8")
    with pytest.raises(ValueError, match=r"XML in .*tst2013\.de-en\.de\.xml"):
        list(find_split(folder, "tst2013", source="de", target="en"))
    with pytest.raises(
        FileNotFoundError, match=r"IWSLT\*\.tst2011\.de-en\.de\.xml or IWSLT\*\.tst2011\.en-de\.de\.xml"
    ):
        find_split(folder, "tst2011", source="de", target="en")
