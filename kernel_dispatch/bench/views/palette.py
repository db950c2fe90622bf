"""The colours of page and drawings: on paper, in the dark, and told apart by colour-blind readers.

Every shape has a contrast of at least 3:1 with its background, every text one of 4.5:1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "panel": "#f5f7f9",
    "ink": "#1b2127",
    "muted": "#56616c",
    "grid": "#d9dfe5",
    "link": "#0b5c93",
    "good": "#0b6b4f",
    "bad": "#a63a00",
    # After Okabe and Ito, the light ones darkened; the first is the baseline's.
    "s0": "#56616c",
    "s1": "#0072b2",
    "s2": "#c75500",
    "s3": "#00875f",
    "s4": "#a8487f",
    "s5": "#8f6a00",
    "s6": "#3d8fc2",
    "s7": "#5b4ea3",
}
DARK: Mapping[str, str] = {
    "paper": "#11161b",
    "panel": "#1a2128",
    "ink": "#e4e9ee",
    "muted": "#a3aeb9",
    "grid": "#313b45",
    "link": "#7cc0f0",
    "good": "#5fd0a8",
    "bad": "#ff9d66",
    "s0": "#a3aeb9",
    "s1": "#4da6e0",
    "s2": "#f08a4b",
    "s3": "#2fbf92",
    "s4": "#dd8fbb",
    "s5": "#e0b030",
    "s6": "#9bd0f2",
    "s7": "#a79cf0",
}
SERIES = 8
# A browser takes the generic one. A renderer without fontconfig may not know what that stands for.
FONTS = "sans-serif,'DejaVu Sans','Liberation Sans',Arial,Helvetica,'Noto Sans'"

# The style of every drawing. The page gives it its variables, a file has them filled in.
_DRAWN = """
.chart text{font-family:FONTS;font-size:12px;fill:var(--ink)}
.chart text.small{font-size:11px}
.chart text.muted{fill:var(--muted)}
.chart text.strong{font-weight:bold}
.chart .halo{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
.chart .grid{stroke:var(--grid);stroke-width:1;fill:none}
.chart .dots{stroke:var(--muted);stroke-width:1;stroke-dasharray:1 3;fill:none}
.chart .one,.chart .roof{stroke:var(--ink);stroke-width:1.5;fill:none}
.chart .bar{fill-opacity:.85}
.chart .whisker{stroke:var(--ink);stroke-width:1.25;fill:none}
.chart .cross{stroke:var(--bad);stroke-width:1.75;fill:none}
.chart .samples{stroke-width:4.5;stroke-linecap:round;stroke-opacity:.55;fill:none}
.chart .band{fill:var(--ink);fill-opacity:.16}
.chart .mark{stroke:var(--paper);stroke-width:.15}
"""


def rules() -> str:
    """Style sheet of the drawings, in terms of variables."""
    series = "".join(
        f".chart .f{n}{{fill:var(--s{n})}}\n.chart .l{n}{{stroke:var(--s{n})}}\n"
        for n in range(SERIES)
    )
    return _DRAWN.strip().replace("FONTS", FONTS) + "\n" + series


def explicit(style: str, colours: Mapping[str, str] = LIGHT) -> str:
    """For files: there is no page around them that could have variables."""
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], style)


def variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
