"""The page in headless Chromium: sorting, filters, narrow windows, the dark, and no complaints."""

from __future__ import annotations

import base64
import hashlib
import html as html_text
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_dispatch.bench.views import page, palette
from tests.bench import page_runs
from tests.bench.page_runs import EVERY

CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt install chromium"),
]

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--virtual-time-budget=5000"
).split()
_WATCH = """
window.complaints = [];
addEventListener("error", (event) => complaints.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => complaints.push(event.violatedDirective));
for (const kind of ["error", "warn"]) console[kind] = (...said) => complaints.push(said.join(" "));
"""
_HELPERS = """
const rows = () => [...document.querySelectorAll("#rows tbody")];
const seen = () => rows().filter((body) => body.getBoundingClientRect().height > 0);
const heads = [...document.querySelectorAll("#rows thead th")];
const head = (title) => heads.find((each) => each.textContent.trim() === title);
const column = (title) => heads.indexOf(head(title));
const keys = (title) => rows().map((b) => b.rows[0].cells[column(title)].dataset.sort ?? null);
const click = (title) => head(title).querySelector("button").click();
const choose = (name, value) => {
  const field = document.querySelector(`#filters [name=${name}]`);
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
const results = {};
"""

Visit = Callable[..., dict[str, Any]]


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    """Open a page in a frame of that width, run a script after its own, return `results`.

    A frame can be narrower than any window; links in it would lead out of it, so None is no frame.
    The page keeps its policy against scripts: only the two of the test are let in beside its own.
    """

    def visit(html: str, script: str, width: int | None = 1200, *flags: str) -> dict[str, Any]:
        tell = "results.complaints = complaints; parent.document.body.dataset.results = "
        after = f"(async () => {{{_HELPERS}{script}\n{tell} JSON.stringify(results);}})();"
        for each in (_WATCH, after):
            digest = base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
            html = html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
        html = html.replace("<title>", f"<script>{_WATCH}</script><title>", 1)
        html = html.replace("</body>", f"<script>{after}</script></body>")
        if width is not None:
            style = f"width:{width}px;height:800px;border:0"
            frame = f'<iframe style="{style}" srcdoc="{html_text.escape(html)}"></iframe>'
            html = f"<!doctype html><body>{frame}</body>"
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        return _dumped(file, tmp_path / "profile", flags)

    return visit


def _dumped(file: Path, profile: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    command = [str(CHROMIUM), *_FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=60)
    found = re.search(r'data-results="([^"]*)"', done.stdout)
    assert found, f"the script did not finish: {done.stderr[-2000:]}"
    results: dict[str, Any] = json.loads(html_text.unescape(found[1]))
    assert results["complaints"] == []
    return results


def test_a_click_sorts_up_then_down_with_missing_values_last(visit: Visit) -> None:
    found = visit(
        page.html(page_runs.normal()),
        """
for (const title of ["Peak memory", "Workload", "Status"]) {
  click(title);
  const up = keys(title), said = head(title).getAttribute("aria-sort");
  click(title);
  results[title] = { up, said, down: keys(title), then: head(title).getAttribute("aria-sort") };
}
results.marked = document.querySelectorAll("[aria-sort]").length;
results.reasons = rows().every((b) => (b.dataset.status !== "ok") === (b.rows.length === 2));
results.count = rows().length;
head("Error").querySelector("button").focus();
results.focus = document.activeElement.textContent;
""",
    )
    for title in ("Peak memory", "Workload", "Status"):
        told = found[title]
        assert (told["said"], told["then"]) == ("ascending", "descending")
    sizes = [int(key) for key in found["Peak memory"]["up"] if key is not None]
    assert sizes == sorted(sizes)
    assert sizes != sorted(sizes, key=str), "the run must tell numbers from texts"
    down = [int(key) for key in found["Peak memory"]["down"] if key is not None]
    assert down == sizes[::-1]
    missing = len(found["Peak memory"]["up"]) - len(sizes)
    assert missing > 0
    assert (
        found["Peak memory"]["up"][-missing:]
        == found["Peak memory"]["down"][-missing:]
        == [None] * missing
    )
    assert found["Workload"]["up"] == sorted(found["Workload"]["up"])
    assert found["Workload"]["down"] == sorted(found["Workload"]["up"], reverse=True)
    assert found["marked"] == 1
    assert found["reasons"] is True
    assert found["count"] == len(page_runs.normal().rows)
    assert found["focus"] == "Error"


def test_filters_hide_rows_and_say_how_many_are_left(visit: Visit) -> None:
    run = page_runs.normal()
    found = visit(
        page.html(run),
        """
const state = () => ({ seen: seen().map((b) => [b.dataset.workload, b.dataset.contender]),
  said: document.getElementById("shown").textContent });
results.all = state();
choose("status", "missing"); results.missing = state();
choose("contender", "eager"); results.none = state();
choose("status", ""); results.eager = state();
choose("contender", ""); choose("workload", "BERT"); results.bert = state();
""",
    )
    total = len(run.rows)
    assert len(found["all"]["seen"]) == total
    assert found["all"]["said"] == f"{total} of {total} rows"
    assert {contender for _, contender in found["missing"]["seen"]} == {"openvino"}
    assert found["none"] == {"seen": [], "said": f"0 of {total} rows"}
    assert {contender for _, contender in found["eager"]["seen"]} == {"eager"}
    assert len(found["eager"]["seen"]) == len(run.workloads())
    assert {workload for workload, _ in found["bert"]["seen"]} == {"bert_base"}


_OVERFLOW = """
for (const each of document.querySelectorAll("details")) each.open = true;
const page = document.documentElement;
results.width = innerWidth;
results.overflow = page.scrollWidth - page.clientWidth;
results.wide = [...document.querySelectorAll("body *")]
  .filter((e) => !e.closest(".scroll, pre, .tall, svg"))
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => e.tagName + "." + e.className);
const shown = (kind) => [...document.querySelectorAll(kind)]
  .filter((e) => e.getBoundingClientRect().height > 0).length;
results.drawings = [shown(".wide"), shown(".narrow")];
"""


@pytest.mark.parametrize("name", ["normal", "hostile", "200 rows", "empty"])
def test_nothing_is_wider_than_a_phone(visit: Visit, name: str) -> None:
    found = visit(page.html(EVERY[name]()), _OVERFLOW, 360)
    assert found["width"] == 360
    assert found["overflow"] == 0
    assert found["wide"] == []
    assert found["drawings"][0] == 0
    assert found["drawings"][1] > 0


def test_a_wide_window_has_the_wide_drawings(visit: Visit) -> None:
    found = visit(page.html(page_runs.normal()), _OVERFLOW, 1200)
    assert (found["overflow"], found["wide"], found["drawings"][1]) == (0, [], 0)
    assert found["drawings"][0] > 0


@pytest.mark.parametrize(
    ("scheme", "colours"), [(0, palette.DARK), (1, palette.LIGHT)], ids=["dark", "light"]
)
def test_follows_the_preferred_colours(visit: Visit, scheme: int, colours: dict[str, str]) -> None:
    found = visit(
        page.html(page_runs.normal()),
        """
const hex = (colour) => "#" + colour.match(/\\d+/g).slice(0, 3)
  .map((part) => Number(part).toString(16).padStart(2, "0")).join("");
const style = (selector) => getComputedStyle(document.querySelector(selector));
results.paper = hex(style("body").backgroundColor);
results.ink = hex(style("body").color);
results.text = hex(style("svg text:not([class])").fill);
results.bar = hex(style("rect.bar.f1").fill);
""",
        1200,
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    assert found["paper"] == colours["paper"]
    assert found["ink"] == found["text"] == colours["ink"]
    assert found["bar"] == colours["s1"]


def test_hostile_texts_do_nothing(visit: Visit) -> None:
    html = page.html(page_runs.hostile())
    found = visit(html, "results.hit = typeof window.hit; results.count = rows().length;")
    assert found["hit"] == "undefined"
    assert found["count"] == len(page_runs.hostile().rows)


def test_a_link_in_the_table_opens_its_workload(visit: Visit) -> None:
    found = visit(
        page.html(page_runs.normal()),
        """
const details = document.getElementById("workload-1");
results.before = details.open;
const changed = new Promise((done) => addEventListener("hashchange", done));
rows().find((b) => b.dataset.workload === "gpt2_small").querySelector("a").click();
await changed;
results.after = details.open;
results.said = details.querySelector("summary strong").textContent;
results.targets = rows().every((b) => document.querySelector(b.querySelector("a").hash));
""",
        None,
    )
    assert found["before"] is False
    assert found["after"] is True
    assert found["said"] == "gpt2_small"
    assert found["targets"] is True


def test_everything_is_open_while_it_is_printed(visit: Visit) -> None:
    found = visit(
        page.html(page_runs.normal()),
        """
const all = [...document.querySelectorAll("details")];
dispatchEvent(new Event("beforeprint"));
results.printed = all.every((each) => each.open);
dispatchEvent(new Event("afterprint"));
results.after = all.some((each) => each.open);
""",
    )
    assert (found["printed"], found["after"]) == (True, False)
