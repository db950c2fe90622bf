"""Inductor: torch's code generator. C++ on CPU, Triton on CUDA and ROCm; forward and backward."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lowering import (
    added_rows,
    attention_in_four,
    attention_patterns,
    autotuning,
    before_autograd,
    by_torch,
    comparisons,
    conversions,
    convolution_gradients,
    convolution_inputs,
    corrected_means,
    cut_short,
    elementary,
    errors_in_loops,
    explicit_roundings,
    extremes,
    from_weights,
    image_layouts,
    input_checks,
    integer_products,
    local_buffers,
    masks,
    merged_branches,
    moments,
    negative_places,
    neutral_constants,
    overwritten,
    parallel_loops,
    parting,
    patches,
    pooling,
    providers,
    reductions,
    region_pass,
    rolled,
    rows_at_once,
    saved_tensors,
    spelled_attention,
    strided_gradients,
    toolchain,
    unequal_heads,
    unrolled,
    value_checks,
    vectors_of_rows,
    vocabulary,
    written_first,
)
from lowering.contract import Compiled, Probe, Provider, Region, RegionMaker, Request
from lowering.graphs import clone, dump
from lowering.regions.calls import has_transforms
from lowering.regions.resampling import Resampling


def probe() -> Probe:
    """Inductor works when it can generate code for a device of this machine."""
    compiler = toolchain.probe()
    triton = importlib.util.find_spec("triton") is not None
    metal = torch.backends.mps.is_available()  # needs neither of the two
    if not compiler.available and not metal and not (torch.cuda.is_available() and triton):
        return Probe.no(compiler.reason, compiler.fix)
    return Probe.yes(torch.__version__, cxx=compiler.version or compiler.reason)


# What each mode string adds to what the target wants at O3.
_MODE_CONFIG: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"max_autotune": False, "triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "triton.cudagraphs": False},
}


def config_of(request: Request) -> dict[str, Any]:
    """Of one request: target, then mode, then threads, then the user's own."""
    config = dict(request.target_config)
    config.update(_MODE_CONFIG.get(request.mode or "default", {}))
    if request.threads is not None:
        config["cpp.threads"] = request.threads
    config.update(request.inductor_config)
    return config


def compile(request: Request) -> Compiled:
    """Through Inductor's own entry, so that its caches, AOTAutograd and lazy backward all apply."""
    from torch._dynamo.eval_frame import innermost_fn
    from torch._inductor import config as inductor_config

    with _torchs_own_warnings_ignored():
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if _takes_attention(request):
        _write_as_calls(request.graph)
    negative_places.refuse(request.graph)
    value_checks.keep(request.graph)
    explicit_roundings.keep(request.graph)
    patches.write_as_linear(request)
    merged = merged_branches.merge(request)
    request, ahead = from_weights.split(request)
    exact = clone(request.graph) if _takes_fewer_bits(request) else None
    request, ordered = before_autograd.lower(request)
    fewer_bits = [] if exact is None else _layers_in_fewer_bits(request.graph.graph)
    config = config_of(request)
    if request.dump_folder:
        config["post_grad_custom_post_pass"] = dump_pass(request.dump_folder)
    regions = [*merged, *ahead.regions, *ordered]
    more: dict[str, Any] = {}
    generate: Any = autotuning.or_without(_without_wrong_loops(compile_fx_inner), request.noted)
    inner_compile = generate
    users = config.get("post_grad_custom_pre_pass")
    config["post_grad_custom_pre_pass"] = _in_cache_keys(request, _autocast(request), users)
    if request.region_rows or request.only_plan:
        inner_compile = _with_regions(request, regions, generate)
    if _wants_whole_operators(request) and vocabulary.keeps(request.graph):
        with inductor_config.patch(config):  # which operators are taken apart depends on it
            if not inductor_config.freezing:  # its constants would lose their names
                more["decompositions"] = vocabulary.table(_takes_norms(request))
    skips = _cuda_graph_skips()
    with (
        attention_patterns.compared_whole(),
        parting.put_right(),
        cut_short.made_anew(),
        neutral_constants.computed(),
        input_checks.of_others_only(),
        _keys_that_suffice(request.graph),
    ):
        run: Any = compile_fx(
            request.graph,
            list(request.example_inputs),
            inner_compile=_or_eager_backward(request, inner_compile),
            config_patches=config or None,
            **more,
        )
    run = innermost_fn(run)  # Dynamo stays out of it already: what calls it is a backend's result
    notes = [
        *ahead.notes,
        *_skipped_cuda_graphs(skips, _cuda_graph_skips()),
        *_frozen(request, config),
    ]
    if exact is not None and fewer_bits:
        from lowering import reduced_linear

        run = reduced_linear.made_ready(run, fewer_bits, exact.forward)
    return Compiled(
        run=before_autograd.counted(ahead.of(run), regions), regions=regions, notes=notes
    )


def _keys_that_suffice(module: fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """AOTAutograd's cache takes graphs that differ in the value of a Python float for the same one,
    and the code in it has that value as a constant (pytorch#197889)."""
    from torch._functorch import config

    values = (node.meta.get("example_value") for node in module.graph.nodes)
    if any(isinstance(value, torch.SymFloat) for value in values):
        return config.patch(enable_autograd_cache=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _torchs_own_warnings_ignored() -> Iterator[None]:
    """Inductor's import uses what torch calls deprecated: under `-W error`, which many test suites
    set, that would end every compilation. Once it is imported nothing is touched: to set filters
    anew makes Python forget what it has warned of already."""
    if "torch._inductor.compile_fx" in sys.modules:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _takes_fewer_bits(request: Request) -> bool:
    return any((row.provider, row.region) == ("triton", "linear") for row in request.region_rows)


def _layers_in_fewer_bits(graph: fx.Graph) -> list[tuple[int, str]]:
    """Of each of them: which input is its weight, and the kind."""
    from lowering import reduced_linear

    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    target = reduced_linear.OPERATOR
    calls = graph.find_nodes(op="call_function", target=target)
    return [(inputs[call.args[1]], call.args[3]) for call in calls]


def _write_as_calls(module: fx.GraphModule) -> None:
    """All attention as calls that torch's kernel takes."""
    graph = module.graph
    if has_transforms(graph):  # values within them are of no use outside
        return
    changed = attention_in_four.write(graph), unequal_heads.fill_up(graph)
    if sum(changed) + spelled_attention.join(graph):
        module.recompile()


def _takes_attention(request: Request) -> bool:
    takers = {(row.target, row.provider) for row in request.region_rows}
    return ("cpu", "mha") in takers and not request.training


def _cuda_graph_skips() -> int:
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def _skipped_cuda_graphs(before: int, after: int) -> list[str]:
    if after <= before:
        return []
    return ["not captured as a CUDA graph; TORCH_LOGS=perf_hints says why"]


def _frozen(request: Request, config: dict[str, Any]) -> list[str]:
    from torch._inductor import config as inductor_config

    if request.training or not config.get("freezing", inductor_config.freezing):
        return []
    return [
        "freezing is on: weights are constants of Inductor's, and kernels of ours take none of "
        "them; they prepack weights without it, and see when one changes"
    ]


def _wants_whole_operators(request: Request) -> bool:
    """Only kernels that absorb an activation or a BatchNorm need to see one."""
    rows = [row for row in request.region_rows if row.region in ("linear", "convolution")]
    emitting = [row for row in rows if not row.early and providers.maker(row).emit is not None]
    return bool(emitting) and not request.training


def _takes_norms(request: Request) -> bool:
    return any(row.region == "group_norm" for row in request.region_rows)


def _with_regions(request: Request, taken: list[Region], generate: Any) -> Any:
    """Inductor's compile function behind our regions, for forward and backward graphs alike."""
    from torch._inductor import config as inductor_config

    def inner_compile(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_backward"):
            saved_tensors.lay_out(module, example_inputs)
        pooling.put_right(module.graph)
        overwritten.put_right(module.graph)
        added_rows.put_right(module.graph)
        if request.training:
            taken.extend(
                region_pass.lower_training(module, request, bool(kwargs.get("is_backward")))
            )
        else:
            extremes.put_right(module.graph)
            neutral_constants.leave_out_sums(module.graph)
            taken.extend(region_pass.lower_inference(module, request))
            convolution_inputs.lay_out(module.graph)
        if vocabulary.holds_norms(module.graph):
            module = vocabulary.take_apart(module, example_inputs)
        strided_gradients.put_right(module.graph)
        convolution_gradients.put_right(module.graph)
        moments.put_right(module.graph)  # what no region took
        reductions.put_right(module.graph)
        comparisons.put_right(module.graph)
        rolled.put_right(module.graph)
        masks.put_right(module.graph)
        if request.only_plan is not None:
            return _never_run(module, request, bool(kwargs.get("is_backward")))
        kwargs.pop("get_decomp_fn", None)  # it has done its work, and has no stable hash
        if vocabulary.holds_kept(module.graph):
            module = vocabulary.take_apart(module, example_inputs)
        integer_products.put_right(module)
        by_torch.put_right(module.graph)
        conversions.put_right(module.graph)
        elementary.put_right(module.graph)
        module.recompile()
        written_first.mark(module.graph)
        image_layouts.constrain_operators()
        backward = bool(kwargs.get("is_backward"))
        with (
            inductor_config.patch({**_layouts_of(module.graph, request), **_CALLS_OUR_OPERATORS}),
            image_layouts.around_ours(),
            contextlib.nullcontext() if backward else rows_at_once.read_once(example_inputs),
        ):
            return generate(module, example_inputs, **kwargs)

    return inner_compile


def _without_wrong_loops(compile_graph: Any) -> Any:
    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        with (
            local_buffers.of_one_row(),
            parallel_loops.counted_right(),
            unrolled.written_out(),
            vectors_of_rows.read_whole(),
            corrected_means.put_right(),
            errors_in_loops.reach_the_caller(),
            cut_short.made_anew(),
        ):
            return compile_graph(*args, **kwargs)

    return inner_compile


# Inductor generates no code for the operators of our kernels: where this is off, it would refuse
# the graph, and all of it would run eagerly.
_CALLS_OUR_OPERATORS = {"implicit_fallbacks": True}


def _layouts_of(graph: fx.Graph, request: Request) -> dict[str, Any]:
    """The user's own wish counts more; on GPUs, training graphs are left to Inductor."""
    on_cpu = {row.target for row in request.region_rows} == {"cpu"}
    if "layout_optimization" in request.inductor_config or (request.training and not on_cpu):
        return {}
    return image_layouts.config_for(graph, request.training)


def _never_run(module: fx.GraphModule, request: Request, backward: bool) -> Any:
    """For a plan of an absent device: the lowered graph is shown, and no code is generated."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    assert request.only_plan is not None
    request.only_plan(module, backward)
    return make_boxed_func(module.forward)


def _autocast(request: Request) -> str:
    """The dtypes of autocast around the graph, as words; empty without it. Torch up to 2.11 has in
    its cache keys whether there is any, and gives a bfloat16 graph to who wants float16."""
    devices = {one.device.type for one in request.example_inputs if isinstance(one, torch.Tensor)}
    kinds = [kind for kind in sorted(devices | {"cpu"}) if torch.amp.is_autocast_available(kind)]
    inside = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return " ".join(f"{kind}: {torch.get_autocast_dtype(kind)}" for kind in inside)


def _in_cache_keys(request: Request, autocast: str, users: Any) -> Any:
    """The user's own pass or one that does nothing; by its uuid the regions and the dtypes of
    autocast are part of every cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class RegionsWereLowered(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if users is not None:
                users(graph)

        def uuid(self) -> Any:
            mine = f"{region_pass.uuid(request)} {autocast}".rstrip()
            if users is None:
                return mine
            theirs = getattr(users, "uuid", lambda: None)()
            # Without an identity of its own, Inductor caches nothing: that stays so.
            return None if theirs is None else f"{mine} {theirs}"

    return RegionsWereLowered()


def _or_eager_backward(request: Request, compile_graph: Any) -> Any:
    """Inductor's compile function, with a way out for a backward that does not compile.

    AOTAutograd compiles a backward when it is first needed: what it raises then would reach the
    user out of `loss.backward()`, where no other provider can take over any more.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def inner_compile(gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            return compile_graph(gm, example_inputs, **kwargs)
        untouched = clone(gm)
        try:
            return compile_graph(gm, example_inputs, **kwargs)
        except Exception as error:
            if request.failed_later is None:
                raise
            request.failed_later(error)
            return make_boxed_func(untouched.forward)

    return inner_compile


def dump_pass(folder: str) -> Any:
    """Writes every graph as Inductor is about to generate code for it; debugging only.

    Its uuid is new each time, so that a cached graph cannot leave the folder empty.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class DumpPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            dump(fx.GraphModule(graph.owning_module or {}, graph), folder)

        def uuid(self) -> str:
            return f"{folder}:{time.time_ns()}"

    return DumpPass()


# What Inductor computes well on GPUs, or hands to the vendor's library: matched, so that the plan
# says so, and left as it stands.
_LEFT = "norm rope gated".split()
_LEFT_EARLY = "attention cross_entropy linear convolution embedding".split()


def _refuses_resampling(match: Resampling) -> str:
    return "" if match.repeats else "what Inductor generates takes longer than torch's own kernel"


PROVIDER = Provider(
    name="inductor",
    summary="torch's code generator: fused C++ on CPU, Triton on GPUs",
    probe=probe,
    compile=compile,
    plans=True,
    requires=("a C++ compiler on CPU, Triton on GPUs",),
    regions={region: RegionMaker(None) for region in _LEFT},
    early_regions={
        **{region: RegionMaker(None) for region in _LEFT_EARLY},
        "resampling": RegionMaker(None, refuses=_refuses_resampling),
    },
)
