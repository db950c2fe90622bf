"""`python -m tests.support.built_kernels`: the C++ kernels, built where tests look for them.

Workers that start together on a fresh machine would each build them for themselves, and so would
every process that a test starts in the meantime. Without a compiler there is nothing to do.
"""

from __future__ import annotations

from pathlib import Path

from lowering.native import library

# Where pytest's `cache.mkdir` puts what `kernels_of_earlier_runs` names.
STORE = Path(__file__).parents[2] / ".pytest_cache" / "d" / "kernels"


def build() -> str:
    library.keep_in(STORE)
    found = library.probe()
    return f"kernels: {found.details.get('library', found.reason)}"


if __name__ == "__main__":
    print(build())
