"""Attention of one sentence: the weights are the model's, and figures and page show all of them."""

import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer.parameters import abstract_model, initial_parameters, with_parameters
from tests.parity.report.browser import Page, browsing
from tests.train.conftest import ENGLISH, GERMAN, listing
from train.attention_maps import KINDS, MOST_PIECES, AttentionMaps, attention_maps, draw
from train.attention_page import SCALE, to_html, write_attention
from train.bpe import BPETokenizer
from train.checkpoint import Checkpoints, RunRecord
from train.config import BatchConfig, EvaluationConfig, TokenizerConfig, TrainConfig
from train.run_dir import RunDir
from train.translate import TrainedRun, load_run
from transformer_config import BOS_ID, EOS_ID, TransformerConfig

SENTENCE, TRANSLATION = "fünf acht neun", "five eight nine one"
SCRIPT = "acht <script>alert(1)</script> & $x$ 'neun' \"eins\""
LAYERS = {"encoder.layers.{}.self_attn": 2, "decoder.layers.{}.self_attn": 3, "decoder.layers.{}.cross_attn": 3}
NAMES = [name.format(layer) for name, layers in LAYERS.items() for layer in range(layers)]
HEADS = 5


def write_run(folder: Path, **changes: object) -> Path:
    """A run as training leaves it, with random parameters, drawn large so that no attention is even."""
    config = TrainConfig(
        run_dir=folder,
        tokenizer=TokenizerConfig(vocab_size=275),
        model=TransformerConfig(
            d_model=20,
            d_ff=26,
            num_heads=HEADS,
            num_encoder_layers=2,
            num_decoder_layers=3,
            **changes,
        ),
        batch=BatchConfig(max_len=11),
        evaluation=EvaluationConfig(max_decode_len=11),
    )
    tokenizer = BPETokenizer.train([" ".join(GERMAN), " ".join(ENGLISH)] * 5, config.tokenizer)
    run = RunDir(folder)
    run.write_config(config)
    tokenizer.save(run.tokenizer_file)
    drawn = initial_parameters(config.with_vocabulary(tokenizer.size).model, jax.random.key(5))
    params = {name: np.asarray(value) * 2.5 for name, value in drawn.items()}
    checkpoints = Checkpoints(run.checkpoints, keep=1)
    try:
        checkpoints.save_params(7, params, RunRecord(config=config.to_dict(), tokenizer=tokenizer.to_json()))
    finally:
        checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("attention") / "run")


@pytest.fixture(scope="module")
def trained(run: Path) -> TrainedRun:
    return load_run(run)


@pytest.fixture(scope="module")
def maps(trained: TrainedRun) -> AttentionMaps:
    return attention_maps(trained, SENTENCE, translation=TRANSLATION)


@pytest.fixture(scope="module")
def written(run: Path) -> Path:
    """The folder that the command writes, for a translation of the model's own."""
    return write_attention(run, SCRIPT).parent


def read_data(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_weights_are_the_models(trained: TrainedRun, maps: AttentionMaps) -> None:
    model = with_parameters(abstract_model(trained.config.model), trained.params)
    src, tgt = trained.tokenizer.encode([SENTENCE, TRANSLATION])
    weights = jax.jit(type(model).attention_weights)  # not compiled they are rounded otherwise
    expected = weights(model, jnp.array([[*src, EOS_ID]]), jnp.array([[BOS_ID, *tgt]]))
    assert [attention.name for attention in maps.attentions] == NAMES
    assert set(NAMES) == expected.keys()
    for attention in maps.attentions:
        np.testing.assert_array_equal(attention.weights, expected[attention.name][0])
    assert maps.given
    assert maps.finished


def test_rows_sum_to_one_and_nothing_is_seen_ahead(maps: AttentionMaps) -> None:
    src_len, tgt_len = (len(maps.pieces[side]) for side in ("source", "target"))
    assert src_len != tgt_len == len(maps.predicted)
    for attention in maps.attentions:
        lengths = {"source": src_len, "target": tgt_len}
        assert attention.weights.shape == (HEADS, lengths[attention.kind.queries], lengths[attention.kind.keys])
        np.testing.assert_allclose(attention.weights.sum(-1), 1.0, atol=1e-5)
        ahead = np.triu(attention.weights, 1).max()
        assert (ahead == 0.0) == (attention.kind.title == "Decoder self-attention")


def test_pieces_are_those_that_are_read_and_predicted(maps: AttentionMaps) -> None:
    source, target = maps.pieces["source"], maps.pieces["target"]
    assert "".join(source) == SENTENCE.replace(" ", "␣").replace("ü", "<0xC3><0xBC>") + "<eos>"
    assert "".join(target) == "<bos>" + TRANSLATION.replace(" ", "␣")
    assert (*target[1:], "<eos>") == maps.predicted


def test_the_translation_is_the_models_own(trained: TrainedRun) -> None:
    maps = attention_maps(trained, SENTENCE)
    assert not maps.given
    model = with_parameters(abstract_model(trained.config.model), trained.params)
    src, length = [*trained.tokenizer.encode([SENTENCE])[0], EOS_ID], len(maps.predicted)
    next_pieces = jax.jit(lambda tgt: model(jnp.array([src]), tgt)[0].at[:, jnp.array([0, BOS_ID])].set(-jnp.inf))
    read = np.zeros((1, length + 1), np.int32)  # padding, which what stands before it does not see
    read[0, 0] = BOS_ID
    for position in range(length):
        read[0, position + 1] = next_pieces(read)[position].argmax()
    written = read[0, 1:].tolist()
    assert EOS_ID not in written[:-1]
    assert maps.predicted == trained.tokenizer.readable(written, "target")
    assert maps.pieces["target"] == trained.tokenizer.readable([BOS_ID, *written[:-1]], "target")
    assert maps.translation == trained.tokenizer.decode([written])[0]
    assert maps.finished == (written[-1] == EOS_ID)


@pytest.mark.parametrize("attention", ["library", "blockwise"])
def test_every_implementation_has_weights(tmp_path: Path, maps: AttentionMaps, attention: str) -> None:
    other = attention_maps(load_run(write_run(tmp_path, attention=attention)), SENTENCE, translation=TRANSLATION)
    for ours, theirs in zip(maps.attentions, other.attentions, strict=True):
        np.testing.assert_array_equal(ours.weights, theirs.weights)


def test_pieces_are_readable() -> None:
    tokenizer = BPETokenizer.train(["schön schön"] * 3, TokenizerConfig(vocab_size=264))
    (ids,) = tokenizer.encode([" a\t\u200b日\\"])
    shown = tokenizer.readable([*range(4), *ids], "source")
    parts = tuple(f"<0x{byte:02X}>" for letter in "\u200b日" for byte in letter.encode())
    assert shown == ("<pad>", "<bos>", "<eos>", "<unk>", "␣", "a", "<U+0009>", *parts, "\\")
    every = tokenizer.readable(range(4, 260), "source")
    assert len(set(every)) == 256
    assert all(piece.isprintable() for piece in every)
    assert tokenizer.readable(range(260, 264), "source") == ("ch", "sch", "<0xB6>n", "ön")


def test_mistakes(trained: TrainedRun, run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sentence: expected text, got ' \\t'"):
        attention_maps(trained, " \t")
    with pytest.raises(ValueError, match="translation: expected text, got ''"):
        attention_maps(trained, SENTENCE, translation="")
    with pytest.raises(ValueError, match=r"sentence: expected UTF-8, got 'a\\udcff'"):
        attention_maps(trained, "a\udcff")
    with pytest.raises(ValueError, match=rf"sentence: expected at most {MOST_PIECES} pieces, .*, got 201"):
        attention_maps(trained, "x" * 200)
    with pytest.raises(FileExistsError, match=f"{tmp_path}: expected a folder that does not exist yet"):
        write_attention(run, SENTENCE, output=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json: expected the config of a run"):
        write_attention(tmp_path, SENTENCE)
    assert list(tmp_path.iterdir()) == []


def test_no_more_pieces_than_the_model_has_positions(tmp_path: Path) -> None:
    trained = load_run(write_run(tmp_path, positions="learned", max_len=11))
    for text, translation in (("x" * 11, "y"), ("x", "y" * 11)):
        name = "sentence" if len(text) == 11 else "translation"
        with pytest.raises(ValueError, match=f"{name}: expected at most 11 pieces, the end included, got 12"):
            attention_maps(trained, text, translation=translation)
    assert attention_maps(trained, "x" * 10, translation="y" * 10).pieces["target"] == ("<bos>", *"yyyyyyyyyy")
    assert len(attention_maps(trained, "x" * 10).predicted) <= 11


def test_a_failure_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"expected matplotlib .*pip install 'twinformer\[plot\]'"):
        write_attention(run, SENTENCE, output=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_for_every_kind_and_layer(written: Path) -> None:
    assert listing(written).keys() == {"attention.html", *(f"{name}.png" for name in NAMES)}
    for name in NAMES:
        start = (written / f"{name}.png").read_bytes()[:24]
        assert start.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", start[16:])
        assert width > 400
        assert height > 300


def test_the_figures_hold_every_head_with_its_pieces(maps: AttentionMaps, tmp_path, monkeypatch) -> None:
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw(maps, tmp_path)
    for figure, attention in zip(drawn, maps.attentions, strict=True):
        *axes, bar = (axis for axis in figure.axes if axis.axison)
        assert figure.get_suptitle() == f"{attention.kind.title}, layer {attention.layer}"
        assert [axis.get_title() for axis in axes] == [f"head {head}" for head in range(HEADS)]
        assert bar.get_ylabel() == "weight"
        for axis, weights in zip(axes, attention.weights, strict=True):
            np.testing.assert_array_equal(axis.images[0].get_array(), weights)
            assert axis.images[0].get_clim() == (0.0, 1.0)
        assert [label.get_text() for label in axes[4].get_yticklabels()] == list(maps.pieces[attention.kind.queries])
        for head in (1, 4):  # the lowest of their columns
            assert [x.get_text() for x in axes[head].get_xticklabels()] == list(maps.pieces[attention.kind.keys])


def test_the_page_holds_every_head_and_fetches_nothing(written: Path, trained: TrainedRun) -> None:
    html = (written / "attention.html").read_text(encoding="utf-8")
    maps, data = attention_maps(trained, SCRIPT), read_data(html)
    assert [attention["name"] for attention in data["attentions"]] == NAMES
    for shown, attention in zip(data["attentions"], maps.attentions, strict=True):
        np.testing.assert_allclose(np.array(shown["weights"]) / SCALE, attention.weights, atol=0.51 / SCALE)
    assert data["pieces"] == {side: list(pieces) for side, pieces in maps.pieces.items()}
    assert "default-src 'none'" in html
    links = Links()
    links.feed(html)
    assert [link for link in links.found if not link.startswith(("#", "data:"))] == []
    assert links.found[1:] == [f"#{name}/{head}" for name in NAMES for head in range(HEADS)]
    assert "//" not in re.sub(r"//  |; *//", "", html.split("<script>")[0])
    assert "url(" not in html


class Links(HTMLParser):
    """Addresses in href and src."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def test_what_the_sentence_holds_is_escaped(trained: TrainedRun) -> None:
    html = to_html(attention_maps(trained, SCRIPT, translation="</script><!-- " + SCRIPT))
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x$" in html
    assert "<script>alert" not in html
    assert len(re.findall("</script>", html)) == 2  # the data's and the page's own
    assert "<!--" not in html
    assert "".join(read_data(html)["pieces"]["source"]) == SCRIPT.replace(" ", "␣") + "<eos>"


def test_the_command(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder"
    options = ["--run", str(run), "--translation", TRANSLATION, "--output", str(output)]
    for status in (0, 1):
        command = [sys.executable, "-m", "train", "attention", *options, SENTENCE]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stderr
    assert done.stderr == f"error: {output}: expected a folder that does not exist yet\n"
    assert (output / "attention.html").is_file()
    assert list(output.parent.iterdir()) == [output]


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browsing() as page:
        yield page


@pytest.fixture
def page(browser: Page, written: Path) -> Iterator[Page]:
    """The page in a browser; nothing was fetched and nothing complained when the test has ended."""
    browser.messages.clear()
    browser.requests.clear()
    file = written / "attention.html"
    browser.open(file, width=1280)
    yield browser
    assert browser.messages == []
    assert {request.partition("#")[0] for request in browser.requests} == {file.resolve().as_uri()}


def told(page: Page) -> str:
    return page.evaluate("document.getElementById('told').innerText")


def press(page: Page, key: str) -> None:
    for kind in ("rawKeyDown", "keyUp"):
        code = {"Enter": 13, "Escape": 27, "End": 35, "ArrowRight": 39, "ArrowDown": 40}[key]
        text = {"text": "\r", "type": "keyDown"} if (key, kind) == ("Enter", "rawKeyDown") else {"type": kind}
        page.send("Input.dispatchKeyEvent", key=key, code=key, windowsVirtualKeyCode=code, **text)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_all_heads_are_drawn_first(page: Page, written: Path, trained: TrainedRun, width: int, dark: bool) -> None:
    page.open(written / "attention.html", width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('a.map canvas').length") == len(NAMES) * HEADS
    assert not page.evaluate("document.querySelector('dialog').open")
    (weights,) = (a.weights[3] for a in attention_maps(trained, SCRIPT).attentions if a.name == NAMES[-1])
    pixels = page.evaluate(
        f"(() => {{ const c = document.querySelector('a[href=\"#{NAMES[-1]}/3\"] canvas');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; })()"
    )
    red = np.array(pixels).reshape(*weights.shape, 4)[..., 0].astype(float)
    darker_when_heavier = np.corrcoef(red.ravel(), weights.ravel())[0, 1]
    assert darker_when_heavier > 0.8 if dark else darker_when_heavier < -0.8
    page.evaluate(f"location.hash = '#{NAMES[-1]}/3'; dispatchEvent(new HashChangeEvent('hashchange'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "with a map enlarged"


def test_an_address_picks_a_head_and_cells_tell_their_weights(page: Page, written: Path, trained: TrainedRun) -> None:
    maps = attention_maps(trained, SCRIPT)
    for attention in (maps.attentions[0], maps.attentions[-1]):
        page.evaluate(f"location.hash = '#{attention.name}/2'; dispatchEvent(new HashChangeEvent('hashchange'))")
        assert page.evaluate("document.querySelector('dialog').open")
        title = f"{attention.kind.title}, layer {attention.layer}, head 2"
        assert page.evaluate("document.getElementById('which').innerText") == title
        queries, keys = maps.pieces[attention.kind.queries], maps.pieces[attention.kind.keys]
        headers = "[...document.querySelectorAll('{} th')].map(header => header.textContent)"
        assert page.evaluate(headers.format("thead")) == list(keys)
        assert page.evaluate(headers.format("tbody")) == list(queries)
        labels = page.evaluate("[...document.querySelectorAll('tbody td')].map(cell => cell.ariaLabel)")
        assert [label.rpartition(": ")[0] for label in labels] == [f"{q} to {k}" for q in queries for k in keys]
        shown = np.array([float(label.rpartition(": ")[2]) for label in labels])
        np.testing.assert_allclose(shown, attention.weights[2].ravel(), atol=0.51 / SCALE)
        hovered = "document.querySelector('tbody').rows[1].cells[3]"
        page.evaluate(f"{hovered}.dispatchEvent(new MouseEvent('mouseover', {{ bubbles: true }}))")
        assert told(page).startswith(f"{queries[1]} attends to {keys[2]} with weight {attention.weights[2][1, 2]:.3f}")
    assert told(page).endswith(f"; predicted next: {maps.predicted[1]}")


def wait_for(page: Page, condition: str) -> None:
    """Events that follow a change of the address come later, so the page is asked again and again."""
    deadline = time.monotonic() + 20.0
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def test_it_is_used_by_keys_alone(page: Page, trained: TrainedRun) -> None:
    source = attention_maps(trained, SCRIPT).pieces["source"]
    page.evaluate("document.querySelector('a.map').focus()")
    press(page, "Enter")
    wait_for(page, "document.activeElement.matches('td')")
    assert told(page).startswith(f"{source[0]} attends to {source[0]} with weight"), "the first cell has the focus"
    press(page, "ArrowDown")
    press(page, "ArrowRight")
    assert told(page).startswith(f"{source[1]} attends to {source[1]} with weight")
    press(page, "End")
    press(page, "ArrowRight")
    assert told(page).startswith(f"{source[1]} attends to <eos> with weight")
    page.evaluate(
        "document.getElementById('kind').value = 'Cross-attention';"
        "document.getElementById('kind').dispatchEvent(new Event('change', { bubbles: true }))"
    )
    wait_for(page, "document.getElementById('which').innerText === 'Cross-attention, layer 0, head 0'")
    assert page.evaluate("location.hash") == "#decoder.layers.0.cross_attn/0"
    assert page.evaluate("document.getElementById('layer').length") == 3
    press(page, "Escape")
    wait_for(page, "!document.querySelector('dialog').open && location.hash === ''")
    assert page.evaluate("document.activeElement.hash") == "#decoder.layers.0.cross_attn/0"


def test_kinds_are_the_papers() -> None:
    assert [kind.name(1) for kind in KINDS] == [name.format(1) for name in LAYERS]
