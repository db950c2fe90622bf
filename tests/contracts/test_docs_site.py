"""The documentation as a site: nothing broken, nothing left out, nothing named that is absent."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_dispatch import cli
from kernel_dispatch.options import OPTIONS
from tests.support.pages import (
    DOCS,
    PAGES,
    ROOT,
    anchors,
    links,
    name,
    prose,
    python_blocks,
    quoted,
)

NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
each_page = pytest.mark.parametrize("page", PAGES, ids=name)
quick = pytest.mark.quick


# --- links ----------------------------------------------------------------------------------------


def broken(page: Path, link: str) -> str:
    """Why a link leads nowhere; empty if it leads somewhere. Other sites are not asked."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return "there is no such file"
    if DOCS in page.parents and DOCS not in target.parents:
        return "it leads out of docs/, so the site lacks it"
    if not anchor:
        return ""
    count = anchors(target).count(anchor)
    return "" if count == 1 else f"{count} headings have that anchor"


@quick
@each_page
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    inside = [link for link in links(page) if "://" not in link]
    found = [f"{link}: {why}" for link in inside if (why := broken(page, link))]
    assert not found, f"{name(page)}: {found}"


@quick
@pytest.mark.parametrize("link", ["nowhere.md", "#no-such-heading", "../README.md", "cpu.md#limit"])
def test_a_broken_link_is_noticed(link: str) -> None:
    assert broken(DOCS / "targets" / "cuda.md", "cpu.md#limits") == ""
    assert broken(
        DOCS / "index.md" if link.startswith("..") else DOCS / "targets" / "cuda.md", link
    )


@quick
def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"([\w/]+\.md)", NAVIGATION)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES[1:])


@quick
def test_every_vendor_and_every_target_has_a_page_under_its_name() -> None:
    from lowering import targets

    for target in targets.ours():
        assert (DOCS / "targets" / f"{target.name}.md").exists()
    for words in ("NVIDIA GPUs", "AMD GPUs", "Google TPUs", "Intel GPUs", "Apple GPUs", "CPUs"):
        assert f'"{words}: ' in NAVIGATION


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; `make docs` installs it")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(https?:)", page.read_text()
        )
        assert not loaded, f"{page.name} loads something from elsewhere"
    assert (tmp_path / "pictures" / "architecture.svg").exists()


# --- what is mentioned exists ---------------------------------------------------------------------


def commands(page: Path) -> Iterator[str]:
    """Arguments of our command line, wherever a page shows one."""
    for text in quoted(page):
        found = re.search(r"(?:python -m kernel_dispatch|kernel-dispatch) +(\w.*)", text)
        if found:
            yield found[1].partition(" #")[0].partition(" | ")[0].strip()


@quick
@each_page
def test_commands_are_ones_that_the_command_line_takes(page: Path) -> None:
    for command in commands(page):
        words = [word for word in shlex.split(command) if word != "..."]
        if words[:2] in (["bench", "compare"], ["bench", "show"]):
            words[:2] = [" ".join(words[:2])]
        if "--" in words:
            words = words[: words.index("--")]
        if len(words) == 1:  # the name alone, in a sentence
            words.append("--help")
        try:
            cli.parser().parse_args(words)
        except SystemExit as leaving:
            assert leaving.code == 0, f"{name(page)}: kernel-dispatch {command}"


@quick
def test_every_command_is_on_the_page_of_commands() -> None:
    page = (DOCS / "command_line.md").read_text()
    known: Any = cli.parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert {command for command in known if f"| `{command}" not in page} == set()


@quick
def test_every_example_is_on_the_page_of_examples() -> None:
    named = re.findall(r"\| `(examples/\w+\.py)` \|", (DOCS / "examples.md").read_text())
    assert sorted(named) == sorted(path.as_posix() for path in _relative(ROOT / "examples"))


def _relative(folder: Path) -> list[Path]:
    return [path.relative_to(ROOT) for path in folder.glob("*.py") if path.name != "__init__.py"]


@quick
@each_page
def test_variables_make_targets_and_files_exist(page: Path) -> None:
    text = page.read_text()
    variables = set(re.findall(r"\bUNIFIED_[A-Z_]+\b", text)) - {option.env for option in OPTIONS}
    assert not variables - {"UNIFIED_"}, name(page)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^    |`)make ([a-z][\w-]*)", text, re.MULTILINE):
        assert re.search(rf"^[^\t#]*\b{target}\b[^=]*$", makefile, re.MULTILINE), f"make {target}"
    places = "docs|lowering|kernel_dispatch|triton_kernels|tests|benchmarks|examples"
    for file in re.findall(rf"`((?:{places})/[\w./*]+)`", text):
        assert list(ROOT.glob(file.rstrip("/"))), f"{name(page)} names {file}"


def exists(dotted: str) -> bool:
    """A module, or an attribute of one."""
    names = dotted.split(".")
    for end in range(len(names), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(names[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in names[end:]:
            if not hasattr(value, attribute):
                return attribute in getattr(value, "__annotations__", {})
            value = getattr(value, attribute)
        return True
    return False


@quick
@each_page
def test_python_names_exist(page: Path) -> None:
    packages = "kernel_dispatch|lowering|triton_kernels"
    named = re.findall(rf"(?<![\w./-])((?:{packages})(?:\.[A-Za-z_]\w*)+)(?![\w/])", prose(page))
    files = ("md", "py", "json", "metal")
    dotted = {one for one in named if one.rpartition(".")[2] not in files}
    # The group of entry points that targets of others register in is no module.
    wrong = [one for one in sorted(dotted - {"kernel_dispatch.targets"}) if not exists(one)]
    assert not wrong, f"{name(page)}: {wrong}"


# --- the newcomer's path --------------------------------------------------------------------------


def test_the_quickstart_leads_from_an_own_model_to_a_report_and_a_forced_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file as it stands, and its commands, at a level that needs no C++ compiler."""
    page = DOCS / "quickstart.md"
    (block,) = [block for block in python_blocks(page) if "def make" in block]
    (tmp_path / "shop.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ways = [one for one in commands(page) if one.startswith("explain shop:make")]
    assert ["--device" in way for way in ways] == [False, True]
    for way in ways:
        sys.modules.pop("shop", None)
        assert cli.main([*shlex.split(way), "--level", "O1"]) == 0
        assert "target cpu" in capsys.readouterr().out
    assert cli.main(["explain", "shop:make", "--device", "cuda"]) != 0
    sys.modules.pop("shop", None)
