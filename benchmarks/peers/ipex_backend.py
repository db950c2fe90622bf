"""Intel Extension for PyTorch, in an interpreter of its own: its last release needs torch 2.8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.peers.evidence import inductor_code, one_clear_line, watched
from benchmarks.peers.installation import OwnInterpreter, versions
from kernel_dispatch.bench import Case, Contender

_NAME = "intel-extension-for-pytorch"
_INTERPRETER = OwnInterpreter("ipex", _NAME, "2.8")


def _prepare(case: Case) -> Callable[..., Any]:
    with one_clear_line():
        import intel_extension_for_pytorch as ipex

        fn: Any = case.fn
        if isinstance(fn, torch.nn.Module):
            # Its documentation turns prepacking off for torch.compile, which sees plain weights.
            fn = ipex.optimize(fn.eval(), weights_prepack=False)
        return watched(torch.compile(fn, backend="ipex"), inductor_code)


PEERS = (
    Contender(
        "ipex",
        'ipex.optimize(model.eval(), weights_prepack=False), torch.compile(model, backend="ipex")',
        _prepare,
        missing=_INTERPRETER.missing,
        version=partial(versions, "torch", _NAME),
        python=_INTERPRETER.python,
        trains=False,
    ),
)
