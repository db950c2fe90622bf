"""The figures of a run as files: SVG documents that stand alone, and PNG made from them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.views import chart_roofline, chart_samples, chart_speedups, palette
from lowering.errors import UnifiedError, unknown

WIDE, NARROW = 760, 340


class DrawingError(UnifiedError, RuntimeError):
    """A drawing that cannot be made with what is installed here."""


def speedup_bars(
    run: Run,
    *,
    workloads: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
    width: int = WIDE,
    inline: bool = False,
) -> str:
    """Of all workloads and contenders unless told which. Inline: for a page with our styles."""
    theirs = _known(workloads, run.workloads(), "workload")
    ours = _known(contenders, run.contenders(), "contender")
    rows = [row for row in run.rows if row.workload in theirs and row.contender in ours]
    return chart_speedups.draw(run, rows, width, inline)


def roofline(run: Run, *, width: int = WIDE, inline: bool = False) -> str:
    return chart_roofline.draw(run, width, inline)


def samples(run: Run, rows: Sequence[Row], *, width: int = WIDE, inline: bool = False) -> str:
    return chart_samples.draw(run, rows, width, inline)


def png(svg: str, scale: float = 2) -> bytes:
    """Through resvg, with this machine's fonts: DejaVu, Liberation, Arial or Noto Sans."""
    if not 0 < scale <= 16:
        raise ValueError(f"scale {scale:g}: not above 0 and at most 16")
    try:
        resvg = importlib.import_module("resvg_py")
    except ImportError as error:
        raise DrawingError("PNG files need the package resvg-py: pip install resvg-py") from error
    if _probed(resvg, "n") == _probed(resvg, ""):
        raise DrawingError(
            "PNG files need a font, and none was found: install DejaVu Sans (apt install "
            "fonts-dejavu-core) or keep the SVG"
        )
    return _rendered(resvg, svg, scale)


def _probed(resvg: object, letter: str) -> bytes:
    """resvg leaves out, without a word, text for which it finds no font."""
    return _rendered(resvg, _PROBE.format(palette.FONTS, letter), 1)


_PROBE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">'
    '<text x="2" y="16" font-size="16" style="font-family:{}">{}</text></svg>'
)


def _rendered(resvg: object, svg: str, scale: float) -> bytes:
    return bytes(resvg.svg_to_bytes(svg_string=svg, zoom=scale))  # type: ignore[attr-defined]


def _known(asked: Sequence[str] | None, known: Sequence[str], kind: str) -> Sequence[str]:
    for name in asked or ():
        if name not in known:
            raise unknown(kind, name, known)
    return known if asked is None else asked
