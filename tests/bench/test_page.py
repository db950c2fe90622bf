"""The page of a run: complete, well-formed, self-contained, and inert whatever the texts hold."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest

from kernel_dispatch.bench.results import Run
from kernel_dispatch.bench.views import figures, means, page, palette
from tests.bench import page_runs
from tests.bench.page_runs import EVERY, failed, ok, run_of

pytestmark = pytest.mark.quick

TIMES = "\u00d7"
VOID = {"meta", "input", "br", "img", "link", "hr", "base", "source"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        own = [self] if self.tag == tag else []
        return own + [found for child in self.children for found in child.all(tag)]

    def __getitem__(self, name: str) -> str:
        return self.attributes[name]

    def whole_text(self) -> str:
        return self.text + "".join(child.whole_text() for child in self.children)


class Tree(HTMLParser):
    """Raises at the first end tag that does not fit."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(html)
        self.close()
        assert self._open == [self.root], f"never closed: {[each.tag for each in self._open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice: {tag} {attrs}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(Element("#text", {}, data))


@pytest.fixture(scope="module", params=EVERY)
def run(request: pytest.FixtureRequest) -> Run:
    return EVERY[request.param]()


@pytest.fixture(scope="module")
def html(run: Run) -> str:
    return page.html(run)


@pytest.fixture(scope="module")
def tree(html: str) -> Element:
    return Tree(html).root


def elements(root: Element) -> list[Element]:
    return [root, *(found for child in root.children for found in elements(child))]


def test_is_well_formed_and_no_id_is_there_twice(html: str, tree: Element) -> None:
    assert html.startswith("<!doctype html>")
    assert html.encode("utf-8")  # no lone surrogate
    ids = Counter(each["id"] for each in elements(tree) if "id" in each.attributes)
    assert {name for name, count in ids.items() if count > 1} == set()
    for link in tree.all("a"):
        assert link["href"].removeprefix("#") in ids


def test_drawings_inside_are_well_formed_and_have_alternatives(html: str) -> None:
    drawn = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert drawn
    for svg in drawn:
        root = ElementTree.fromstring(svg)
        hidden, title = root.get("aria-hidden"), root.findtext("title")
        assert hidden == "true" or (root.get("role") == "img" and title and root.findtext("desc"))
        assert "nan" not in "".join(each.get("d", "") for each in root.iter())


def test_needs_nothing_from_outside(tree: Element) -> None:
    for each in elements(tree):
        assert each.tag not in ("link", "iframe", "img", "object", "embed", "base")
        for name in ("src", "srcset", "href", "action", "data", "poster", "xlink:href"):
            assert each.attributes.get(name, "#").startswith("#"), each
        assert "url(" not in each.attributes.get("style", "")
    (style,) = tree.all("style")
    assert not re.search(r"url\(|@import|https?:", style.whole_text())


def test_every_row_and_every_reason_is_there(run: Run, tree: Element) -> None:
    bodies = [b for b in tree.all("tbody") if "data-workload" in b.attributes]
    assert len(bodies) == len(run.rows)
    for row, body in zip(run.rows, bodies, strict=True):
        told = body.whole_text()
        for text in (row.workload, row.contender, row.status, row.reason.strip()):
            assert text.split("\x1b")[0] in told
        if row.status != "ok":
            assert len(body.all("tr")) == 2
        cells = body.all("tr")[0].children
        assert len(cells) == len(tree.all("thead")[-1].all("th"))
    assert len([d for d in tree.all("details") if d.attributes.get("class") == "workload"]) == len(
        run.workloads()
    )


def test_only_the_script_of_the_page_may_run(tree: Element) -> None:
    data, script = tree.all("script")
    assert data["type"] == "application/json"
    assert not re.search("[<>&]", data.whole_text())
    digest = hashlib.sha256(script.whole_text().encode()).digest()
    policies = [m["content"] for m in tree.all("meta") if "http-equiv" in m.attributes]
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in policies[0]
    assert "default-src 'none'" in policies[0]
    for each in elements(tree):
        assert not [name for name in each.attributes if name.startswith("on")], each


def test_holds_the_run_as_json(run: Run, tree: Element) -> None:
    found = json.loads(tree.all("script")[0].whole_text())
    assert [row["contender"] for row in found["rows"]] == [row.contender for row in run.rows]
    assert [row["reason"] for row in found["rows"]] == [row.reason for row in run.rows]
    assert found["baseline"] == run.baseline
    assert set(found) == set(Run.__dataclass_fields__)


def test_infinities_are_strings_in_the_json() -> None:
    found = json.loads(Tree(page.html(page_runs.not_numbers())).root.all("script")[0].whole_text())
    assert found["rows"][1]["numerics"] == {"error": "inf", "baseline_error": "nan", "allowed": 0.0}
    assert found["limits"]["read_bytes"] == "nan"


def test_hostile_text_stays_text() -> None:
    tree = Tree(page.html(page_runs.hostile())).root
    shown = "<script>window.hit = 1</script><img src=x onerror='hit=1'>\"'&amp;"
    assert tree.all("img") == []
    assert len(tree.all("script")) == 2
    places = [each for tag in ("td", "th", "dd", "dt", "pre", "option") for each in tree.all(tag)]
    assert sum(shown in each.whole_text() for each in places) >= 15
    assert shown in "".join(each.whole_text() for each in tree.all("pre"))
    assert "\x1b" not in tree.whole_text()


def test_what_is_missing_has_no_sort_key_and_numbers_have_plain_ones() -> None:
    rows = [ok("w", "eager", 0.0123), failed("w", "other", "missing", "not here")]
    bodies = Tree(page.html(run_of(rows))).root.all("tbody")[-2:]
    heads = [
        "".join(each.text for each in head.children)
        for head in Tree(page.html(run_of(rows))).root.all("thead")[-1].all("th")
    ]
    median, error = heads.index("Median"), heads.index("Error")
    timed, absent = (body.all("tr")[0].children for body in bodies)
    assert timed[median]["data-sort"] == "0.0123"
    assert timed[median].whole_text() == "12.3 ms"
    assert float(timed[error]["data-sort"]) == 2.1e-7
    assert [i for i, cell in enumerate(absent) if "data-sort" in cell.attributes] == [0, 1, 2]


def cells_of(line: Element) -> list[str]:
    return [cell.whole_text().strip().replace(TIMES, "x") for cell in line.children]


def summary_cells(html: str, contender: str) -> list[str]:
    for line in Tree(html).root.all("tr"):
        cells = cells_of(line)
        if cells[0] == contender and "rows" in cells[2]:
            return cells
    raise AssertionError(contender)


def test_means_are_geometric_and_over_the_rows_that_all_passed() -> None:
    run = run_of(
        [
            *(ok(name, "eager") for name in "xyz"),
            ok("x", "fast", speedup=2.0),
            ok("y", "fast", speedup=8.0),
            ok("z", "fast", speedup=4.0),
            ok("x", "picky", speedup=3.0),
            ok("y", "picky", speedup=12.0),
            failed("z", "picky", "wrong"),
            *(failed(name, "absent", "missing") for name in "xyz"),
        ]
    )
    html = page.html(run)
    # Over x and y: sqrt(2 * 8) = 4 and sqrt(3 * 12) = 6. Alone, fast: (2 * 8 * 4) ** (1/3) = 4.
    assert summary_cells(html, "fast") == ["fast", "4.00x", "3 of 3 rows", "none", "4.00x (3 of 3)"]
    assert summary_cells(html, "picky") == [
        "picky", "6.00x", "2 of 3 rows", "1 wrong", "6.00x (2 of 3)",
    ]  # fmt: skip
    none = figures.NONE
    assert summary_cells(html, "absent") == [
        "absent", none, "0 of 3 rows", "3 missing", f"{none} (0 of 3)",
    ]  # fmt: skip
    assert "over 2 of 3 workloads" in html


def test_a_mean_on_own_rows_differs_from_the_common_one() -> None:
    rows = [
        ok("x", "a", speedup=2.0),
        ok("y", "a", speedup=0.5),
        ok("x", "b", speedup=3.0),
        failed("y", "b"),
    ]
    found = means.standings(rows, "eager")
    assert [case[0] for case in found.common_cases] == ["x"]
    a, b = found.standings
    assert (a.common, a.own) == (2.0, pytest.approx(1.0))
    assert (b.common, b.own) == (pytest.approx(3.0), pytest.approx(3.0))
    assert (b.own_cases, b.rows, b.passed) == (1, 2, 1)


def test_models_and_ops_are_never_in_one_mean() -> None:
    rows = [ok("m", "a", speedup=2.0), ok("o", "a", speedup=8.0, group="op")]
    lines = map(cells_of, Tree(page.html(run_of(rows))).root.all("tr"))
    means_shown = [cells[1] for cells in lines if cells[0] == "a" and "rows" in cells[2]]
    assert means_shown == ["2.00x", "8.00x"]


def test_rows_without_a_speedup_are_in_no_mean() -> None:
    assert means.usable_speedup(failed("w", "a")) is None
    assert means.usable_speedup(ok("w", "a", speedup=None)) is None
    assert means.usable_speedup(ok("w", "a", speedup=math.nan)) is None
    assert means.geometric_mean([]) is None
    assert "no common mean" in page.html(page_runs.only_failures())


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.seconds(0.0123456), "12.3 ms"),
        (figures.seconds(0.99996), "1.00 s"),
        (figures.seconds(1e-6), "1.00 µs"),
        (figures.seconds(321.0), "321 s"),
        (figures.seconds(None), figures.NONE),
        (figures.seconds_range(0.00099, 0.00101), f"0.990 {figures.NONE} 1.01 ms"),
        (figures.bytes_(123_456_789), "123 MB"),
        (figures.flops_rate(140e9), "140 GFLOP/s"),
        (figures.ratio(0.5), f"0.50{TIMES}"),
        (figures.ratio(12.345), f"12.3{TIMES}"),
        (figures.ratio(0.0123), f"0.0123{TIMES}"),
        (figures.percent(0.456), "45.6%"),
        (figures.digits(1234.5), "1230"),
        (figures.digits(math.inf), "inf"),
    ],
)
def test_figures_have_three_digits_and_a_handy_unit(shown: str, expected: str) -> None:
    assert shown == expected


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_contrast_is_enough_on_paper_and_panel(colours: dict[str, str]) -> None:
    for ground in ("paper", "panel"):
        for name, colour in colours.items():
            if name in ("paper", "panel", "grid"):
                continue
            high, low = sorted((luminance(colour), luminance(colours[ground])), reverse=True)
            wanted = 3.0 if re.fullmatch(r"s\d", name) else 4.5
            assert (high + 0.05) / (low + 0.05) >= wanted, (name, ground)
