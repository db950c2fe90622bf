"""How text that nobody has vetted (names, reasons, reports) becomes HTML, SVG and JSON."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What XML cannot hold (controls, lone surrogates), and what would turn the text around it.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)


def escaped(value: object) -> str:
    """Safe as content and inside a quoted attribute, in HTML and in XML."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", _COLOUR_CODES.sub("", str(value))))


def script_json(value: object) -> str:
    """JSON that cannot end the script element it stands in. Infinities and NaN become strings."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
