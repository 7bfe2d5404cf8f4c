"""The charts of the page as inline SVG. Positions across are percentages, so that a chart fits any width undistorted.

Colours are classes, filled in by the page's style sheet: it knows whether the reader's screen is light or dark.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from markupsafe import Markup, escape

from parity.report.series import Point

LOWEST = 1e-18
"""Errors below are drawn there, and 0 too."""
SHOWN_LABELS = 26


@dataclasses.dataclass(frozen=True)
class Scale:
    """log10 of an error, from `low` to `high` (both powers of ten); infinity lies above, in a lane of its own."""

    low: int
    high: int

    @classmethod
    def of(cls, points: Sequence[Point]) -> "Scale":
        """Around all of their errors and bounds that are finite."""
        drawn = [value(point) for point in points for value in (*(s.value for s in SERIES), *BOUNDS)]
        finite = [max(error, LOWEST) for error in drawn if error is not None and math.isfinite(error)] or [1e-16, 1e-6]
        low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
        return cls(low, max(high, low + 2))

    def share(self, error: float) -> float:
        """0 at `low`, 1 at `high`, 1.06 for what is not finite."""
        if not math.isfinite(error):
            return 1.06
        exponent = math.log10(max(error, LOWEST))
        return min(max((exponent - self.low) / (self.high - self.low), 0.0), 1.0)

    def ticks(self, most: int) -> list[int]:
        """Exponents to label, evenly spaced."""
        step = max(1, math.ceil((self.high - self.low) / most))
        return list(range(self.low, self.high + 1, step))


@dataclasses.dataclass(frozen=True)
class Series:
    """What is drawn of every point."""

    css: str
    title: str
    value: Callable[[Point], float | None]


SERIES = (
    Series("exact", "float64: the port against the reference", lambda p: p.exact),
    Series("reference", "float32: the reference against the float64 answer", lambda p: p.reference),
    Series("port", "float32: the port against the float64 answer", lambda p: p.port),
)
BOUNDS: tuple[Callable[[Point], float | None], ...] = (lambda p: p.exact_bound, lambda p: p.bound)

TOP, HEIGHT = 34, 260
"""Pixels: the lane of what is not finite, the plot."""
LONGEST = 24
"""Characters of a name below the plot; of a longer one, its end."""


def depth_chart(points: Sequence[Point], *, first: str = "") -> Markup:
    """Error (upwards, logarithmic) against depth (the order of module calls) for both frameworks.

    `first`: the module that differs first, if one does; a line stands there.
    """
    scale = Scale.of(points)
    body = [*_bands(points), *_grid(scale), *_first(points, first)]
    body += [_line([value(p) for p in points], scale, "bound") for value in BOUNDS]
    for series in SERIES:
        values = [series.value(p) for p in points]
        body.append(_line(values, scale, series.css))
        body += [
            _marker(f"{_across(i, len(points)):.3f}%", _down(value, scale), series.css, _told(point), point.passed)
            for i, (point, value) in enumerate(zip(points, values, strict=True))
            if value is not None
        ]
    body += _names(points)
    # Names slant: they need the sine of their length below the plot.
    below = 30 + 4.9 * min(LONGEST, max(len(point.name) for point in points))
    width = max(320, round(6.5 * len(points)))
    return Markup(
        '<svg class="depth" role="img" aria-label="Error against depth: {} module outputs, from {} to {}" '
        'height="{}" style="min-width:{}px">{}</svg>'
    ).format(
        len(points),
        points[0].name,
        points[-1].name,
        round(TOP + HEIGHT + below),
        width,
        Markup("").join(body),
    )


def gradient_row(point: Point, scale: Scale) -> Markup:
    """One parameter's errors on a line from left to right: goes into a table's cell."""
    marks = [
        Markup('<line class="grid" x1="{0}%" x2="{0}%" y1="0" y2="20"/>').format(_percent(10.0**tick, scale))
        for tick in scale.ticks(6)
    ]
    for value in BOUNDS:
        bound = value(point)
        if bound is not None:
            marks.append(
                Markup('<line class="bound" x1="{0}%" x2="{0}%" y1="2" y2="18"/>').format(_percent(bound, scale))
            )
    for series in SERIES:
        error = series.value(point)
        if error is not None:
            marks.append(_marker(f"{_percent(error, scale)}%", 10.0, series.css, _told(point), point.passed))
    return Markup('<svg class="row" width="100%" height="20" role="img" aria-label="{}">{}</svg>').format(
        _told(point), Markup("").join(marks)
    )


def gradient_axis(scale: Scale) -> Markup:
    """Powers of ten above the rows."""
    labels = [
        Markup('<text x="{}%" y="12" text-anchor="middle">{}</text>').format(_percent(10.0**tick, scale), _power(tick))
        for tick in scale.ticks(6)
    ]
    return Markup('<svg class="row axis" width="100%" height="16" aria-hidden="true">{}</svg>').format(
        Markup("").join(labels)
    )


def meter(error: float, bound: float) -> Markup:
    """How much of its bound an error used: a bar that is full at the bound."""
    share = 0.0 if error == 0.0 else error / bound if bound > 0.0 else math.inf
    filled = 0.0 if share == 0.0 else min(max(share, 0.02), 1.0) if share < math.inf else 1.0
    told = f"error {error:.1e}, bound {bound:.1e}"
    return Markup(
        '<svg class="meter" width="100%" height="8" role="img" aria-label="{0}"><title>{0}</title>'
        '<rect class="rail" width="100%" height="8" rx="4"/>'
        '<rect class="{1}" width="{2:.1f}%" height="8" rx="4"/></svg>'
    ).format(told, "ok" if share <= 1.0 else "fail", 100.0 * filled)


def _across(i: int, count: int) -> float:
    """Percent from the left, with room for the axis."""
    return 6.0 + 92.0 * (i + 0.5) / count


def _percent(error: float, scale: Scale) -> str:
    return f"{4.0 + 88.0 * scale.share(error):.2f}"


def _down(error: float, scale: Scale) -> float:
    return TOP + HEIGHT * (1.0 - scale.share(error))


def _line(values: Sequence[float | None], scale: Scale, css: str) -> Markup:
    """Stretched to the width of the chart; the stroke is not."""
    count = len(values)
    known = [(i, value) for i, value in enumerate(values) if value is not None and math.isfinite(value)]
    points = " ".join(f"{_across(i, count):.3f},{_down(value, scale):.1f}" for i, value in known)
    return Markup(
        '<svg viewBox="0 0 100 {0}" width="100%" height="{0}" preserveAspectRatio="none">'
        '<polyline class="{1}" points="{2}"/></svg>'
    ).format(TOP + HEIGHT, css, points)


def _marker(x: str, y: float, css: str, told: str, passed: bool) -> Markup:
    title = Markup("<title>{}</title>").format(told)
    if css == "exact":  # another shape, for whoever does not tell colours apart
        shape = Markup('<svg x="{}" y="{:.1f}" overflow="visible"><rect class="{}" x="-3" y="-3" width="6" height="6">')
        mark = shape.format(x, y, css) + title + Markup("</rect></svg>")
    else:
        # A dot in a ring, where both have the same error.
        radius = 2.6 if css == "port" else 4.2
        shape = Markup('<circle class="{}" cx="{}" cy="{:.1f}" r="{}">')
        mark = shape.format(css, x, y, radius) + title + Markup("</circle>")
    ring = Markup('<circle class="beyond" cx="{}" cy="{:.1f}" r="7"/>').format(x, y)
    return mark if passed or css == "reference" else ring + mark


def _bands(points: Sequence[Point]) -> Iterator[Markup]:
    """The model's parts, behind the points: a band for each first name on the path."""
    start, shaded = 0, False
    for i in range(1, len(points) + 1):
        part = points[start].name.partition(".")[0]
        if i < len(points) and points[i].name.partition(".")[0] == part:
            continue
        left, right = _across(start, len(points)), _across(i - 1, len(points))
        half = 46.0 / len(points)
        width = right - left + 2 * half
        shape = Markup('<rect class="{}" x="{:.3f}%" y="0" width="{:.3f}%" height="{}"/>')
        yield shape.format("band shaded" if shaded else "band", left - half, width, TOP + HEIGHT)
        if width > 9.0:
            label = Markup('<text class="part" x="{:.3f}%" y="14" text-anchor="middle">{}</text>')
            yield label.format((left + right) / 2, part.partition("[")[0])
        start, shaded = i, not shaded


def _first(points: Sequence[Point], first: str) -> Iterator[Markup]:
    for i, point in enumerate(points):
        if point.name == first:
            x = _across(i, len(points))
            mark = Markup('<line class="first" x1="{0:.3f}%" x2="{0:.3f}%" y1="20" y2="{1}"><title>{2}</title></line>')
            yield mark.format(x, TOP + HEIGHT, f"first difference: {first}")


def _grid(scale: Scale) -> Iterator[Markup]:
    for tick in scale.ticks(8):
        y = _down(10.0**tick, scale)
        yield Markup(
            '<line class="grid" x1="6%" x2="98%" y1="{0:.1f}" y2="{0:.1f}"/>'
            '<text x="5.4%" y="{1:.1f}" text-anchor="end">{2}</text>'
        ).format(y, y + 4, _power(tick))


def _names(points: Sequence[Point]) -> Iterator[Markup]:
    step = max(1, math.ceil(len(points) / SHOWN_LABELS))
    for i in range(0, len(points), step):
        name = points[i].name
        short = name if len(name) <= LONGEST else "…" + name[1 - LONGEST :]
        yield Markup(
            '<svg x="{:.3f}%" y="{}" overflow="visible"><text class="name" transform="rotate(-52)" text-anchor="end">'
            "{}<title>{}</title></text></svg>"
        ).format(_across(i, len(points)), TOP + HEIGHT + 14, short, name)


def _told(point: Point) -> str:
    parts = [
        f"{series.css if series.css != 'exact' else 'float64 difference'} {error:.1e}"
        for series in SERIES
        if (error := series.value(point)) is not None
    ]
    bounds = [f"{bound:.1e}" for value in BOUNDS if (bound := value(point)) is not None]
    return f"{point.name}: {', '.join(parts)}; bound {' and '.join(bounds)}"


def _power(exponent: int) -> Markup:
    digits = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return escape(f"10{digits}")
