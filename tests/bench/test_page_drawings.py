"""The drawings as files: complete, true to the numbers, and PNG made from them."""

from __future__ import annotations

import itertools
import math
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kernel_dispatch.bench.results import Limits, Roofline, Run
from kernel_dispatch.bench.views import drawing
from kernel_dispatch.bench.views.axis import Axis, labelled_ticks
from lowering.errors import SettingError
from tests.bench import page_runs
from tests.bench.page_runs import EVERY, failed, ok, run_of

pytestmark = pytest.mark.quick

NAMESPACE = "{http://www.w3.org/2000/svg}"
DRAWINGS: dict[str, Callable[..., str]] = {
    "speed-up": drawing.speedup_bars,
    "roofline": drawing.roofline,
    "samples": lambda run, **options: drawing.samples(run, run.rows[:8], **options),
}


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{NAMESPACE}text")]


@pytest.mark.parametrize("width", [drawing.WIDE, drawing.NARROW])
@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("run", EVERY.values(), ids=EVERY)
def test_stands_alone(run: Callable[[], Run], name: str, width: int) -> None:
    svg = DRAWINGS[name](run(), width=width)
    root = parsed(svg)
    assert root.tag == f"{NAMESPACE}svg"
    assert root.get("role") == "img"
    assert root.findtext(f"{NAMESPACE}title")
    assert root.findtext(f"{NAMESPACE}desc")
    assert "var(" not in svg and "currentColor" not in svg and "url(" not in svg
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "", 1)
    left, top, across, down = map(float, root.get("viewBox", "").split())
    for each in root.iter(f"{NAMESPACE}text"):
        if "transform" not in each.attrib and each.get("x") and float(each.get("y", 0)):
            assert left <= float(each.get("x", 0)) <= left + across
            assert top <= float(each.get("y", 0)) <= top + down
    for each in root.iter():
        numbers = " ".join(each.get(key, "") for key in ("d", "x", "y", "width", "transform"))
        assert not re.search(r"nan|inf", numbers)


def test_bars_of_twice_and_half_as_fast_are_equally_long_and_point_apart() -> None:
    run = run_of([ok("w", "eager"), ok("w", "twice", speedup=2.0), ok("w", "half", speedup=0.5)])
    root = parsed(drawing.speedup_bars(run))
    twice, half = (each for each in root.iter(f"{NAMESPACE}rect") if "bar" in each.get("class", ""))
    assert float(twice.get("width", 0)) == pytest.approx(float(half.get("width", 0)), abs=0.2)
    end = float(half.get("x", 0)) + float(half.get("width", 0))
    assert end == pytest.approx(float(twice.get("x", 0)), abs=0.2)


def test_every_compared_row_has_a_bar_or_says_what_became_of_it() -> None:
    run = page_runs.normal()
    root = parsed(drawing.speedup_bars(run))
    bars = [each for each in root.iter(f"{NAMESPACE}rect") if "bar" in each.get("class", "")]
    compared = [row for row in run.rows if row.contender != "eager"]
    assert len(bars) == sum(row.status == "ok" for row in compared)
    for status in ("wrong", "missing", "failed"):
        assert texts(root).count(status) == sum(row.status == status for row in compared)
    hints = [each.text or "" for each in root.iter(f"{NAMESPACE}title")]
    for row in compared:
        assert any(row.contender in hint and row.reason in hint for hint in hints)


def test_only_what_was_asked_for_is_drawn() -> None:
    svg = drawing.speedup_bars(
        page_runs.normal(), workloads=["resnet50"], contenders=["unified O2", "inductor"]
    )
    shown = texts(parsed(svg))
    assert {"resnet50", "unified O2", "inductor"} <= set(shown)
    assert not {"bert_base", "unified O1", "onnxruntime"} & set(shown)


def test_an_unknown_name_is_one_line_with_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"unknown workload 'resnet5'.*'resnet50'.*Accepted"):
        drawing.speedup_bars(page_runs.normal(), workloads=["resnet5"])
    with pytest.raises(SettingError, match=r"unknown contender 'inductr'.*'inductor'"):
        drawing.speedup_bars(page_runs.normal(), contenders=["inductr"])


def test_a_row_at_the_limit_lies_on_the_roof() -> None:
    limits = Limits(gemm_flops=1e11, gemm_library="x", read_bytes=1e10)
    memory = Roofline(10**8, 10**8, 0.01, "memory")  # 1 FLOP/byte: 1e8 bytes take 10 ms
    compute = Roofline(10**10, 10**7, 0.1, "compute")  # 1000 FLOP/byte: 1e10 FLOP take 100 ms
    rows = [ok("low", "eager", 0.01, roofline=memory), ok("high", "eager", 0.1, roofline=compute)]
    root = parsed(drawing.roofline(Run(tuple(rows), limits=limits)))
    marks = [
        tuple(map(float, re.findall(r"[\d.]+", each.get("transform", ""))[:2]))
        for each in root.iter(f"{NAMESPACE}path")
        if "mark" in each.get("class", "")
    ]
    roofs = [
        tuple(map(float, re.findall(r"[\d.]+", each.get("d", ""))))
        for each in root.iter(f"{NAMESPACE}path")
        if each.get("class") == "roof"
    ]
    flat, slanted = roofs
    assert marks[1][1] == pytest.approx(flat[1], abs=0.2)
    x1, y1, x2, y2 = slanted
    assert (x2, y2) == pytest.approx(flat[:2], abs=0.2)  # the ridge
    on_roof = y1 + (marks[0][0] - x1) / (x2 - x1) * (y2 - y1)
    assert marks[0][1] == pytest.approx(on_roof, abs=0.5)


def test_the_roofline_tells_what_it_leaves_out() -> None:
    root = parsed(drawing.roofline(page_runs.bare()))
    assert "0 of 3 rows are drawn" in (root.findtext(f"{NAMESPACE}desc") or "")
    assert "not measured" in (root.findtext(f"{NAMESPACE}desc") or "")
    overhead = run_of([ok("w", "eager", group="overhead")])
    assert "0 of 0 rows" in drawing.roofline(overhead)


def test_samples_have_one_dot_per_round() -> None:
    rows = [ok("w", "eager"), failed("w", "other")]
    root = parsed(drawing.samples(run_of(rows), rows))
    dots = [each for each in root.iter(f"{NAMESPACE}path") if "samples" in each.get("class", "")]
    assert [each.get("d", "").count("M") for each in dots] == [20]


@pytest.mark.parametrize(
    ("low", "high"), [(0.97, 1.03), (0.5, 3.9), (0.1, 40.0), (1e-6, 10.0), (1e9, 1.3e9)]
)
def test_ticks_lie_inside_and_their_labels_apart(low: float, high: float) -> None:
    axis = Axis(low, high, 0, 300)
    values = axis.ticks()
    assert 2 <= len(values) <= 20
    assert all(low <= value <= high for value in values)
    places = [axis.at(value) for value, label in labelled_ticks(axis, "{:g}".format) if label]
    assert places == sorted(places)
    assert all(right - left > 10 for left, right in itertools.pairwise(places))
    assert axis.at(math.sqrt(low * high)) == pytest.approx(150)


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("name", DRAWINGS)
def test_png_is_the_drawing_with_its_text(name: str) -> None:
    pytest.importorskip("resvg_py", reason="PNG files are optional: pip install resvg-py")
    svg = DRAWINGS[name](page_runs.normal())
    with_text = drawing.png(svg, 2)
    root = parsed(svg)
    assert png_size(with_text) == (2 * int(root.get("width", 0)), 2 * int(root.get("height", 0)))
    without = drawing.png(re.sub(r"<text.*?</text>", "", svg), 2)
    assert len(with_text) > 1.2 * len(without)


def test_without_the_package_png_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(drawing.DrawingError, match=r"^PNG files need .*pip install resvg-py$"):
        drawing.png("<svg/>")


def test_without_a_font_png_says_so_instead_of_leaving_out_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fontless = SimpleNamespace(svg_to_bytes=lambda **_: b"the same whatever the text")
    monkeypatch.setitem(sys.modules, "resvg_py", fontless)
    with pytest.raises(drawing.DrawingError, match="need a font"):
        drawing.png("<svg/>")


@pytest.mark.parametrize("scale", [0, -1, 17, math.nan])
def test_a_scale_that_makes_no_sense_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 16"):
        drawing.png("<svg/>", scale)
