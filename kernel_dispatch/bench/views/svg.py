"""The few SVG elements that the drawings are made of; text comes in raw and leaves escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kernel_dispatch.bench.views import palette
from kernel_dispatch.bench.views.markup import escaped

# Unit shapes around the origin: colour is never the only thing that tells two contenders apart.
_SHAPES = (
    "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0 -1 0Z",  # circle
    "M-.9 -.9H.9V.9H-.9Z",  # square
    "M0 -1.15L1.1 .85H-1.1Z",  # triangle
    "M0 -1.25L1.25 0L0 1.25L-1.25 0Z",  # diamond
    "M0 1.15L1.1 -.85H-1.1Z",  # triangle on its tip
    "M-.4 -1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",  # plus
    "M-1.15 0L-.57 -1H.57L1.15 0L.57 1H-.57Z",  # hexagon
    "M-1.1 -.45H1.1V.45H-1.1Z",  # dash
    "M0 -1.25L.35 -.35L1.25 0L.35 .35L0 1.25L-.35 .35L-1.25 0L-.35 -.35Z",  # star
)

_EDGE = 14  # of white around the drawing in a file


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    where = f'x="{number(x)}" y="{number(y)}"'
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f"<text {where}{kind}{anchor}>{escaped(content)}</text>"


def path(points: str, kind: str) -> str:
    return f'<path d="{points}" class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", kind)


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    size = f'width="{number(max(width, 0.5))}" height="{number(height)}"'
    return f'<rect x="{number(x)}" y="{number(y)}" {size} class="{kind}"/>'


def cross(x: float, y: float, size: float = 4) -> str:
    a, b, c, d = (number(each) for each in (x - size, x + size, y - size, y + size))
    return path(f"M{a} {c}L{b} {d}M{a} {d}L{b} {c}", "cross")


def mark(series: int, x: float, y: float, size: float = 4.5) -> str:
    place = f'transform="translate({number(x)} {number(y)}) scale({number(size)})"'
    kind = f"mark {fill(series)}"
    shape = _SHAPES[_cycled(series, len(_SHAPES))]
    return f'<path d="{shape}" {place} class="{kind}"/>'


def fill(series: int) -> str:
    return f"f{_cycled(series, palette.SERIES)}"


def stroke(series: int) -> str:
    return f"l{_cycled(series, palette.SERIES)}"


def _cycled(series: int, kinds: int) -> int:
    """The first of each kind is the baseline's alone."""
    return series if series < kinds else 1 + (series - 1) % (kinds - 1)


def hinted(hint: str, parts: Iterable[str]) -> str:
    """A group that shows `hint` under the mouse."""
    return f"<g><title>{escaped(hint)}</title>{''.join(parts)}</g>"


def document(
    width: float, height: float, title: str, description: str, body: Iterable[str], inline: bool
) -> str:
    """Inline: the page around it has the style sheet. Otherwise a file that needs nothing else."""
    edge = 0 if inline else _EDGE
    w, h = math.ceil(width) + 2 * edge, math.ceil(height) + 2 * edge
    box = f'viewBox="{-edge} {-edge} {w} {h}" width="{w}" height="{h}"'
    opening = f'<svg class="chart" role="img" {box}'
    alternative = f"<title>{escaped(title)}</title><desc>{escaped(description)}</desc>"
    if inline:
        return f"{opening}>{alternative}{''.join(body)}</svg>"
    style = f"<style>{palette.explicit(palette.rules())}</style>"
    place = f'x="{-edge}" y="{-edge}" width="{w}" height="{h}"'
    paper = f'<rect {place} fill="{palette.LIGHT["paper"]}"/>'
    namespace = 'xmlns="http://www.w3.org/2000/svg"'
    return f"{opening} {namespace}>{alternative}{style}{paper}{''.join(body)}</svg>\n"


def fitted(content: str, width: float, size: float = 12) -> str:
    """`content`, cut where it would be wider than `width`."""
    most = max(3, int(width / (0.57 * size)))
    return content if len(content) <= most else content[: most - 1] + "…"


def text_width(content: str, size: float = 12) -> float:
    return 0.57 * size * len(content)
