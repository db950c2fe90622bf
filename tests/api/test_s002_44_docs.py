"""Row S002-44: the pages that the documents' readers were promised, and what stands on them."""

from __future__ import annotations

import re

import pytest

from kernel_dispatch.registry.table import TABLE
from lowering import targets
from tests.support.pages import DOCS, anchors, links

pytestmark = pytest.mark.quick

PAGES = {
    "a selection guide": "selection.md",
    "NVIDIA": "targets/cuda.md",
    "AMD": "targets/rocm.md",
    "TPUs": "targets/xla.md",
    "Intel GPUs": "targets/xpu.md",
    "Apple GPUs": "targets/mps.md",
    "CPUs": "targets/cpu.md",
    "troubleshooting": "troubleshooting.md",
    "migration": "migration.md",
    "best practices": "best_practices.md",
}
# Whatever a reader of the two documents may have imported or called.
OLD_NAMES = """
    get_backend BackendFactory BackendType detect_best_backend list_available_backends
    BackendFactory.is_available get_all_backend_info get_optimizer prepare_model
    optimize_for_inference optimize_for_training OptimizationLevel DeviceInfo OptimizationResult
    OptimizationStrategy KernelPyTorchConfig NVIDIABackend AMDBackend TPUBackend IntelBackend
    CPUBackend get_device_info_dict optimize_legacy get_available_backends is_backend_available
    get_backend_info get_default_backend set_default_backend list_backends BackendInfo
    BackendRegistry BackendInterface superoptimize get_backend_macros YIRAGE_BACKEND_USE_CUDA
    PersistentKernel config.cmake BT_CUDA MAX_DMEM_SIZE
""".split()


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_s002_44_pages_are_there_and_link_on(page: str) -> None:
    """A selection guide, a page for each vendor, troubleshooting, migration and best practices are
    there, and no link in the documentation is broken."""
    assert len((DOCS / page).read_text().split()) > 150
    assert links(DOCS / page)


def test_s002_44_the_selection_guide_leads_to_every_target_by_its_vendor() -> None:
    guide = DOCS / "selection.md"
    for target in targets.ours():
        assert f"targets/{target.name}.md" in links(guide)
    for vendor in ("nvidia", "amd", "tpu", "intel", "mps", "cpu"):
        assert f"| `{vendor}` |" in guide.read_text()


def test_s002_44_the_guide_and_the_installation_name_the_fourteen_where_they_compute() -> None:
    rows = [row for row in (DOCS / "selection.md").read_text().splitlines() if "](targets/" in row]
    for target in targets.ours():
        mine = {info.name for info in TABLE if target.name in info.targets}
        cells = [
            row.split("|")[3] for row in rows if row.count("|") == 4 and f"[`{target.name}`]" in row
        ]
        assert [set(re.findall(r"`(\w+)`", cell)) for cell in cells] == [mine]
    install = (DOCS / "install.md").read_text()
    assert {info.name for info in TABLE if f"`{info.name}`" not in install} == set()


@pytest.mark.parametrize("name", OLD_NAMES)
def test_s002_44_every_old_name_is_on_the_page_of_migration(name: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", (DOCS / "migration.md").read_text())


def test_s002_44_troubleshooting_goes_by_symptom_and_knows_every_code_that_asks_for_action() -> (
    None
):
    page = DOCS / "troubleshooting.md"
    assert {"it-is-not-available", "it-is-slow"} <= set(anchors(page))
    assert any(anchor.startswith("it-does-not-compile") for anchor in anchors(page))
    from lowering.reasons import CODES

    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page.read_text()))
    codes = {"compile-failed", "run-failed", "out-of-memory", "provider-absent", "recompile-limit"}
    assert codes <= named & set(CODES)
