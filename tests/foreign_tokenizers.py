"""Small tokenizers of the real classes of `transformers`, learned from a few sentences, in folders like the hub's."""

import io
import json

import sentencepiece
import transformers

GERMAN = (
    "der kleine Hund sieht den großen Hund",
    "ein Mann fährt mit dem Rad durch die Stadt",
    "zwei Frauen gehen um zwölf Uhr durch den Park",
    "am 24. Mai spielen drei Kinder im Garten",
)
ENGLISH = (
    "the small dog sees the big dog",
    "a man rides a bike through the city",
    "two women walk through the park at noon",
    "on May 24 three children play in the garden",
)


def sentencepiece_model(lines, *, vocab_size=60):
    """Its bytes, and its pieces without the special ones."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    reader = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [reader.IdToPiece(i) for i in range(reader.get_piece_size())]
    return model.getvalue(), [piece for piece in pieces if piece not in ("<unk>", "<s>", "</s>")]


def marian(folder, *, separate=False):
    """Returns the sizes of both vocabularies; padding is the last id, as in OPUS-MT."""
    folder.mkdir(exist_ok=True)
    pieces = {}
    for name, lines in (("source", GERMAN), ("target", ENGLISH)):
        data, pieces[name] = sentencepiece_model(lines)
        (folder / f"{name}.spm").write_bytes(data)

    def vocabulary(known):
        return {piece: i for i, piece in enumerate(["</s>", "<unk>", *dict.fromkeys(known), "<pad>"])}

    # In OPUS-MT both have one padding id; with two vocabularies they are as long as each other here.
    both = pieces["source"] + pieces["target"]
    source, target = (pieces["source"], pieces["target"]) if separate else (both, both)
    longest = max(len(set(source)), len(set(target)))
    tables = [
        vocabulary([*dict.fromkeys(known), *(f"<unused{i}>" for i in range(longest - len(set(known))))])
        for known in (source, target)
    ]
    (folder / "vocab.json").write_text(json.dumps(tables[0]))
    settings = {"source_lang": "de", "target_lang": "en"}
    if separate:
        (folder / "target_vocab.json").write_text(json.dumps(tables[1]))
        settings["separate_vocabs"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(tables[0]), len(tables[1])


def m2m_100(folder):
    """Returns the size of the vocabulary, tags of a hundred languages and eight made-up words included."""
    folder.mkdir(exist_ok=True)
    data, pieces = sentencepiece_model(GERMAN + ENGLISH, vocab_size=90)
    (folder / "sentencepiece.bpe.model").write_bytes(data)
    vocabulary = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "M2M100Tokenizer"}))
    return len(vocabulary) + 100 + 8


def fsmt(folder):
    """Returns the sizes of both vocabularies, which differ."""
    folder.mkdir(exist_ok=True)
    sizes = []
    for name, lines in (("src", GERMAN), ("tgt", ENGLISH)):
        letters = sorted({letter for line in lines for letter in line if letter != " "})
        pieces = [*letters, *(f"{letter}</w>" for letter in letters)]
        vocabulary = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
        (folder / f"vocab-{name}.json").write_text(json.dumps(vocabulary))
        sizes.append(len(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {"langs": ["de", "en"], "tokenizer_class": "FSMTTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tuple(sizes)


def nllb(folder):
    """Returns the size of the vocabulary, tags of two hundred languages included."""
    letters = sorted({letter for line in GERMAN + ENGLISH for letter in line if letter != " "})
    vocabulary = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", *letters])}
    tokenizer = transformers.NllbTokenizer(vocab=vocabulary, merges=[])
    tokenizer.save_pretrained(folder)
    return len(tokenizer)
