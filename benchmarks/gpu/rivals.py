"""The others: how each of them is asked for. Imports happen when a rival is made."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.case import Absent, Function, Rival

EAGER, OURS = "eager", "ours"
INDUCTOR, MAX_AUTOTUNE = "inductor", "inductor-max-autotune"
FLASH, CUDNN, EFFICIENT = "sdpa-flash", "sdpa-cudnn", "sdpa-efficient"
CUBLAS_AND_EPILOGUE = "cublas+epilogue"


def inductor(own: Function) -> Rival:
    """With sizes as constants: what a kernel tuned for one shape has to be compared with."""
    return Rival(INDUCTOR, lambda: torch.compile(entry(own, INDUCTOR), dynamic=False))


def max_autotune(own: Function) -> Rival:
    """Without CUDA graphs of its own: all contenders are timed in graphs of ours."""
    more = {"dynamic": False, "mode": "max-autotune-no-cudagraphs"}
    return Rival(MAX_AUTOTUNE, lambda: torch.compile(entry(own, MAX_AUTOTUNE), **more))


def entry(function: Function, name: str) -> Function:
    """A function with code of its own around it: Dynamo keeps what was compiled by code object,
    and would look through one contender's guards before it comes to the next one's."""

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    code = call.__code__.replace(co_name=name.replace("-", "_"))
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def plain(name: str, function: Function) -> Rival:
    return Rival(name, lambda: function)


def liger(name: str, call: Callable[[Any], Function], clones: bool = False) -> Rival:
    """`call` makes the function of `liger_kernel.transformers.functional`."""

    def make() -> Function:
        try:
            functions = importlib.import_module("liger_kernel.transformers.functional")
            return call(functions)
        except (ImportError, AttributeError) as error:
            raise Absent(f"liger_kernel is not installed, or has no {name}: {error}") from None

    return Rival("liger", make, clones)


def sdpa(settings: Callable[..., dict[str, Any]], *names: str) -> tuple[Rival, ...]:
    """`settings` of query and key: scaled_dot_product_attention's own arguments by name."""
    backends = {
        FLASH: "FLASH_ATTENTION",
        CUDNN: "CUDNN_ATTENTION",
        EFFICIENT: "EFFICIENT_ATTENTION",
    }
    return tuple(_forced(name, backends[name], settings) for name in names or backends)


def _forced(name: str, backend: str, settings: Callable[..., dict[str, Any]]) -> Rival:
    def make() -> Function:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        only = getattr(SDPBackend, backend)

        def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            more = settings(query, key)
            if name == EFFICIENT and more.pop("enable_gqa", False):
                group = query.shape[1] // key.shape[1]  # it has no word for shared heads
                key, value = (one.repeat_interleave(group, 1) for one in (key, value))
            with sdpa_kernel(only):
                return functional.scaled_dot_product_attention(query, key, value, **more)

        return call

    return Rival(name, make)


def flex_decoding() -> Rival:
    def make() -> Function:
        from torch.nn.attention.flex_attention import flex_attention

        def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
            return flex_attention(query, key, value, enable_gqa=True)

        return torch.compile(call, dynamic=False)

    return Rival("flex-decoding", make)


def product_and_epilogue(product: Function, epilogue: Function) -> Rival:
    """cuBLAS, and everything after it in one kernel of Inductor's."""

    def make() -> Function:
        after = torch.compile(epilogue, dynamic=False)
        return lambda *inputs: after(product(*inputs), *inputs)

    return Rival(CUBLAS_AND_EPILOGUE, make)
