"""The C++ compiler and Python's headers, as Inductor finds them; and the command that brings them.

Nothing is installed or changed, and importing this file starts nothing.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lowering.contract import Probe

_COMPILER_PACKAGES = {
    "apt-get": "apt-get install -y g++",
    "dnf": "dnf install -y gcc-c++",
    "yum": "yum install -y gcc-c++",
    "zypper": "zypper install -y gcc-c++",
    "apk": "apk add g++",
    "pacman": "pacman -S --noconfirm gcc",
}
_HEADER_PACKAGES = {
    "apt-get": "apt-get install -y python{version}-dev",
    "dnf": "dnf install -y python{version}-devel",
    "yum": "yum install -y python{version}-devel",
    "zypper": "zypper install -y python{digits}-devel",
    "apk": "apk add python3-dev",
}


def probe() -> Probe:
    """Is there a C++ compiler that Inductor will find, and Python's headers? Compiles nothing."""
    from torch._inductor import config

    # Inductor reads CXX once, when it is imported: its own search list is part of the question.
    return _probe(os.environ.get("CXX"), str(config.cpp.cxx))


@functools.cache
def _probe(cxx: str | None, search: str) -> Probe:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except (RuntimeError, OSError) as error:
        # InvalidCxxCompiler is a RuntimeError; a CXX that is no executable is an OSError.
        wish = f" (CXX={cxx or repr(cxx)})" if cxx is not None else ""
        return Probe.no(f"no working C++ compiler{wish}: {error}", compiler_fix(cxx))
    include = _python_include()
    if not (include / "Python.h").is_file():
        return Probe.no(f"Python.h is not in {include}", headers_fix(), compiler=compiler)
    where = shutil.which(compiler) or compiler
    return Probe.yes(_compiler_version(compiler), compiler=where, include=str(include))


def _python_include() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not include.exists() and sys.platform == "darwin":
        # As in Inductor: a framework build of Python keeps its headers elsewhere.
        include = (Path(sysconfig.get_path("stdlib")).parent.parent / "Headers").absolute()
    return include


def _compiler_version(compiler: str) -> str:
    if sys.platform == "win32":
        return compiler  # cl prints its version on stderr only, together with an error
    try:
        shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return compiler
    return next(iter(shown.stdout.splitlines()), compiler)


def compiler_fix(cxx: str | None = None, system: str | None = None) -> str:
    """The command that gives this system a C++ compiler."""
    system = system or platform.system()
    install = {
        "Darwin": "xcode-select --install",
        "Windows": "winget install Microsoft.VisualStudio.2022.BuildTools --override "
        '"--quiet --add Microsoft.VisualStudio.Workload.VCTools --includeRecommended", '
        'then start from the "x64 Native Tools Command Prompt"',
    }.get(system) or _packaged(_COMPILER_PACKAGES, "conda install -y -c conda-forge gxx")
    if cxx:
        return f"Set CXX to a working compiler or unset it (`unset CXX`); to install one: {install}"
    return install


def headers_fix(system: str | None = None) -> str:
    """The command that brings Python.h for this interpreter."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    anywhere = f"uv python install {version}"  # comes with its headers on every system
    if (system or platform.system()) != "Linux":
        return anywhere
    return _packaged(_HEADER_PACKAGES, anywhere).format(
        version=version, digits=version.replace(".", "")
    )


def _packaged(packages: Mapping[str, str], otherwise: str) -> str:
    command = next((line for tool, line in packages.items() if shutil.which(tool)), None)
    if command is None:
        return otherwise
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return command if root else f"sudo {command}"


_TINY = '#include <Python.h>\n#include <vector>\nextern "C" int tiny() { return 1; }\n'


def probe_deep() -> Probe:
    """Really compile a tiny shared library with Inductor's own flags. Loads nothing; for doctor."""
    quick = probe()
    if not quick.available:
        return quick
    with tempfile.TemporaryDirectory(prefix="unified-toolchain-") as folder:
        source = Path(folder) / "tiny.cpp"
        source.write_text(_TINY, encoding="utf-8")
        try:
            built = _build(source, folder)
        except Exception as error:  # noqa: BLE001  (whatever it is, Inductor would meet it too)
            return Probe.no(
                f"{quick.version} cannot build a shared library: {_shortened(str(error))}",
                compiler_fix(os.environ.get("CXX")),
                **quick.details,
            )
        if not built.is_file():
            return Probe.no(f"{quick.version} reported success but wrote no library")
    return quick


def _build(source: Path, folder: str) -> Path:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    builder = CppBuilder("tiny", str(source), CppTorchOptions(), output_dir=folder)
    builder.build()
    return Path(builder.get_target_file_path())


def _shortened(text: str, lines: int = 12) -> str:
    """The end of a compiler's output says what is wrong; the command line before it is long."""
    return "\n".join(line[:300] for line in text.strip().splitlines()[-lines:])
