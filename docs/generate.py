"""Writes what the documentation takes from code, tests and measurements; `--check`: current?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import feature_table
import from_code
import from_public_names
import from_results

DOCS = Path(__file__).parent


def made() -> dict[Path, str]:
    """Every generated file, as it should be."""
    pages = {
        "settings.md": from_code.settings(),
        "capabilities.md": from_code.capabilities(),
        "reasons.md": from_code.reasons(),
        "kernels.md": from_code.kernels(),
        "api.md": from_public_names.page(),
        "features.md": feature_table.page(),
        "results/README.md": from_results.page(),
    }
    named = {DOCS / name: text for name, text in pages.items()}
    return {**named, from_results.README: from_results.readme(), **from_results.plots()}


def main(arguments: Sequence[str]) -> int:
    files = made()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if "--check" not in arguments:
        for path in stale:
            path.write_text(files[path])
        return 0
    for path in stale:
        print(f"{path.name} is out of date: run `python docs/generate.py`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
