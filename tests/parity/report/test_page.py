"""The page in a real browser: nothing fetched, no error, every section, no overflow, at both widths and in the dark."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.report import series, to_json
from parity.report.charts import Point, Scale
from parity.report.page import to_html
from tests.parity.report.browser import Page, browsing

SECTIONS = ("ladder", "depth", "gradients", "modules", "known", "bounds", "environment")
DESKTOP, PHONE = 1280, 390


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browsing() as page:
        yield page


@pytest.fixture(scope="module")
def files(equal: Any, unequal: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for name, report in (("equal", equal), ("unequal", unequal)):
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(to_html(to_json(report)), encoding="utf-8")
    return paths


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("name", ["equal", "unequal"])
def test_it_opens_without_an_error_and_fits(
    browser: Page, files: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.messages.clear()
    browser.requests.clear()
    browser.open(files[name], width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "with everything opened"
    expected = (*SECTIONS, "finding") if name == "unequal" else SECTIONS
    for section in expected:
        assert browser.evaluate(f"document.querySelector('section#{section} h2')?.innerText"), section
        assert browser.evaluate(f"document.getElementById('{section}').getBoundingClientRect().height") > 50
    assert browser.evaluate("document.querySelectorAll('#ladder .rung').length") == 17
    assert browser.messages == []
    assert browser.requests == [files[name].resolve().as_uri()], "one file, nothing fetched"


def test_both_frameworks_and_the_float64_answer_are_drawn_against_depth(browser: Page, files: dict[str, Path]) -> None:
    browser.open(files["equal"], width=DESKTOP)
    for marks in ("rect.exact", "circle.reference", "circle.port"):
        assert browser.evaluate(f"document.querySelectorAll('svg.depth {marks}').length") == 8, marks
    told = browser.evaluate("document.querySelector('svg.depth circle.port title').textContent")
    assert told == "embed: float64 difference 0.0e+00, reference 1.9e-07, port 2.0e-07; bound 1.0e-12 and 9.5e-07"
    assert browser.evaluate("document.querySelectorAll('svg.depth .beyond').length") == 0
    browser.open(files["unequal"], width=DESKTOP)
    assert browser.evaluate("document.querySelectorAll('svg.depth .beyond').length") == 3
    assert "layers.1.norm" in browser.evaluate("document.querySelector('svg.depth line.first title').textContent")


def test_points_lie_where_their_errors_are(browser: Page, files: dict[str, Path]) -> None:
    browser.open(files["equal"], width=DESKTOP)
    heights = browser.evaluate(
        "[...document.querySelectorAll('svg.depth circle')].map(c => [c.getAttribute('class'), +c.getAttribute('cy')])"
    )
    port = {y for css, y in heights if css == "port"}
    reference = {y for css, y in heights if css == "reference"}
    assert len(port) == len(reference) == 1
    assert port.pop() < reference.pop(), "2.0e-7 lies above 1.9e-7"


def test_the_finding_tells_where_what_and_how_to_mend_it(browser: Page, files: dict[str, Path]) -> None:
    browser.open(files["unequal"], width=DESKTOP)
    text = browser.evaluate("document.getElementById('finding').innerText")
    for fragment in ("layers.1.norm", "3.0e-07", "The port's eps is 1e-6", "set eps to 1e-5", "fast variance"):
        assert fragment in text
    assert browser.evaluate("document.querySelector('#modules .first').innerText") == "norm"
    assert browser.evaluate("document.querySelector('#modules .first').checkVisibility()"), "its branch is opened"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast(browser: Page, files: dict[str, Path], dark: bool) -> None:
    """At least 4.5 to 1, which WCAG asks for, for every colour of text on either background."""
    browser.open(files["unequal"], width=DESKTOP, dark=dark)
    colours = browser.evaluate(
        "Object.fromEntries(['paper','panel','ink','muted','ok','ok-soft','fail','fail-soft','skip','skip-soft','port']"
        ".map(n => [n, getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim()]))"
    )
    pairs = [(ink, paper) for ink in ("ink", "muted", "fail", "port") for paper in ("paper", "panel")]
    pairs += [("ok", "ok-soft"), ("fail", "fail-soft"), ("skip", "skip-soft"), ("ok", "paper")]
    for ink, paper in pairs:
        lighter, darker = sorted((luminance(colours[ink]), luminance(colours[paper])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, paper)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_names_are_escaped(equal: Any) -> None:
    html = to_html(to_json(equal))
    assert "toy &lt;b&gt;&amp;" in html
    assert "<decoder>" not in html
    assert "toy <b>" not in html


def test_everything_that_is_drawn_has_a_name_for_screen_readers(equal: Any) -> None:
    html = to_html(to_json(equal))
    for tag in re.findall(r"<svg[^>]*>", html):
        nested = "viewBox" in tag or 'overflow="visible"' in tag
        assert nested or "aria-label=" in tag or 'aria-hidden="true"' in tag, tag


def test_of_several_batches_the_worst_is_drawn(equal: Any) -> None:
    document = to_json(equal)
    section = document["rungs"][5]["sections"][0]
    section["comparisons"] = [
        {
            "tensor": f"embed (batch {n})",
            "error": error,
            "bound": 1e-12,
            "passed": True,
            "reference": None,
            "detail": "",
        }
        for n, error in ((1, 1e-16), (2, 4e-16), (3, 2e-16))
    ]
    assert next((p.name, p.exact) for p in series.outputs(document)) == ("embed", 4e-16)


def test_infinity_lies_above_all_that_is_finite() -> None:
    points = [Point(name="a", exact=1e-16, exact_bound=1e-12), Point(name="b", exact=float("inf"), exact_bound=1e-12)]
    scale = Scale.of(points)
    assert scale.share(float("inf")) > 1.0 >= scale.share(1e-12) > scale.share(1e-16) >= 0.0
