"""The CPU: always here, and the place where every other target's refusals end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowering import machine, sizes_in_tensors
from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Probe, Target
from lowering.levels import Level


def probe() -> Probe:
    """Never absent; the details are what rows and `doctor` want to know of it."""
    facts = machine.cpu()
    return Probe.yes(
        facts.model,
        vendor=facts.vendor,
        features=sorted(facts.isa | {facts.vendor}),
        effective_cores=facts.effective_cores,
        memory_bytes=facts.memory_bytes,
    )


def inductor_config(level: Level) -> Mapping[str, Any]:
    """At O3 Inductor may time its own alternatives; below it, its defaults are kept."""
    return {"max_autotune": True} if level >= Level.O3 else {}


# Inductor 2.13 gives a wrong pseudo-inverse of a complex matrix, without a word, and its backward
# of these factorisations and solvers raises (the op sweep found both). Nothing to fuse in them.
_WRONG_ON_COMPLEX = frozenset(
    "pinverse linalg_pinv lu lu_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex "
    "linalg_lu_solve".split()
)

# Dynamo leaves functions with these layers uncompiled where gradients are wanted: random numbers
# are eager's then, and have to be without gradients, too.
_UNCOMPILED_WITH_GRADIENTS = frozenset("lstm gru rnn_tanh rnn_relu".split())

# By themselves they are computed at least as fast by torch, which has vector functions of MKL and
# oneDNN. Inductor takes 1.1 to 2.6 times as long, for `group_norm` channels last 4 to 7, for `erfc`
# 5 to 8 (0.1 to 5 ms of float32, one thread of a Xeon with AVX-512, torch 2.13).
_NOTHING_TO_FUSE = frozenset(
    "abs atan ceil erf erfc erfinv exp flip floor gelu group_norm hardsigmoid hardswish hardtanh "
    "leaky_relu neg reciprocal relu relu6 roll round rsqrt sigmoid sign silu tan tanh tril "
    "trunc".split()
)

_LAID_OUT_ONCE = "is laid out once instead of in every call"
_MKL_ROWS = "up to three rows its packed product is up to four times as inexact as its plain one"
_IN_TILES_OF_FLOAT16 = (("linear", 60), ("convolution", 60), ("transposed_convolution", 75))
_SAME_ONEDNN = (
    "IPEX's oneDNN is level with torch's, which needs no library that replaces kernels of torch"
)


def _resampling(
    provider: str, level: Level, priority: int, training: bool, why: str
) -> CapabilityRow:
    return CapabilityRow(
        "cpu",
        provider,
        "resampling",
        level,
        priority=priority,
        dtypes=frozenset({"float32", "float64"}),
        training=training,
        subclasses=False,
        early=True,
        min_ops=2,
        min_bytes=1 << 13,
        why=why,
    )


_NUMBER_BY_NUMBER = (
    "Inductor generates it number by number: reflected padding takes 5 times as long as torch's "
    "kernel, sampling at a grid 5 to 9 times, bilinear interpolation twice (measured: one thread "
    "of Zen 4, torch 2.13)"
)
_COPIES = "each output of nearest neighbours is a copy of an input, which fuses with what follows"


TARGET = Target(
    name="cpu",
    summary="Any CPU that torch runs on, through Inductor, oneDNN and eager",
    device_types=("cpu",),
    probe=probe,
    aliases=("host", "x86", "arm"),
    priority=10,
    proven_on="x86-64 (AMD EPYC, Intel Xeon), Linux",
    inductor_config=inductor_config,
    rows=(
        CapabilityRow(
            "cpu",
            "inductor",
            GRAPH,
            Level.O2,
            priority=50,
            refused_ops=frozenset({sizes_in_tensors.KIND}),
            refused_complex_ops=_WRONG_ON_COMPLEX,
            refused_random_ops=_UNCOMPILED_WITH_GRADIENTS,
            negated=False,
            refused_alone=_NOTHING_TO_FUSE,
            min_ops=2,
            min_bytes=1 << 16,
            min_bytes_training=1 << 20,
            why="one op on little data has nothing to fuse: a 64x64 linear or softmax takes 5 to "
            "10 us longer per call in Inductor's code than in eager, and 60 us longer with "
            "gradients; from 64 KiB on a variance, an argmax or a pooling gains more than that "
            "(measured: AMD EPYC, AVX2 and Zen 4, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16"}),
            training=False,
            why="weights laid out once, bias to residual in one pass, a microsecond to call; "
            "float16 is computed in float32, which eager does number by number",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"amd", "avx512_bf16"}),
            why="the CPU's own bfloat16 products, as in oneDNN, and all that follows in floats "
            "before the one rounding",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"amx_bf16"}),
            min_flops=1 << 16,
            before_measured=True,
            why="tiles of AMX, activations computed beside them: 128 rows of 768 to 3072 take 0.53 "
            "ms, through oneDNN 0.73; 1024 rows of 1024 to 1024 1.4 and 2.8 (measured: weights "
            "from memory, 2 cores of a Xeon with AMX, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "linear",
            Level.O2,
            priority=72,
            dtypes=frozenset({"float16"}),
            training=False,
            features=frozenset({"amx_fp16"}),
            min_flops=1 << 16,
            before_measured=True,
            why="tiles of AMX; single large calls are a tenth faster in oneDNN, but "
            "the layers of a text encoder take 16.7 ms, through oneDNN 21.6 (measured: 2 cores of "
            "a Xeon with AMX of float16, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "linear",
            Level.O2,
            priority=40,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            min_flops=1 << 16,
            why="where the CPU does not multiply bfloat16 itself, it is computed in float32 from "
            "weights that were widened once",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "int8_linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"int8", "float32", "bfloat16", "float16"}),
            training=False,
            why="the weight is read as bytes: one token of a Llama of bytes takes 3.5 ms, in eager "
            "16.7, 256 tokens 27 and 68, Inductor 35; with bfloat16 rows 24.6 and 46, Inductor 180 "
            "(measured: 2 cores of a Xeon with AMX, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "grouped_linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32"}),
            why="weights of experts are read where they lie, a gate is in the same pass: a Mixtral "
            "of 4 layers takes 65 ms for 128 tokens, in eager 107, through Inductor 105; weights "
            "that are looked up are not copied (measured: 2 cores of a Xeon with AMX, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "grouped_linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"bfloat16"}),
            features=frozenset({"avx512_bf16"}),
            why="the CPU's own products, weights of experts read where they lie: a Qwen3-MoE of "
            "4 layers takes 34 ms for 128 tokens, in eager 61, through Inductor 73; one token 9.6, "
            "17.0 and 14.9 (measured: 2 cores of a Xeon with AMX, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "grouped_linear",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float16"}),
            features=frozenset({"amx_fp16"}),
            why="tiles of AMX, as in bfloat16; elsewhere torch's loop stays",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "embedding_bag",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "bfloat16", "float16"}),
            training=False,
            why="all tables in one call, rows asked for before they are read: a DLRM of 26 tables "
            "takes 0.67 ms for one request, in eager 0.82, through Inductor 0.95 (measured: a core "
            "of a Xeon with AMX, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "convolution",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16"}),
            training=False,
            before_measured=True,
            why="weights laid out once, BatchNorm in them, channels last throughout, and all that "
            "reads each other in one call: where oneDNN's 1x1 alone are a tenth faster, "
            "MobileNetV2 takes 21.8 ms with them instead of 10.0 (measured: 2 cores of Zen 3), "
            "RegNetX-008 17.7 instead of 12.5 (a core of a Xeon with AMX, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "convolution",
            Level.O2,
            priority=70,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"amx_bf16"}),
            before_measured=True,
            why="tiles of AMX, and all that reads each other in one call: MobileNetV2 in 3.2 ms, "
            "through oneDNN 8.0, EfficientNet-B0 6.8 and 12.8, ResNet-50, eight images, 67 and 87 "
            "(measured: 2 cores of a Xeon with AMX, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "convolution",
            Level.O2,
            priority=72,
            dtypes=frozenset({"float16"}),
            training=False,
            features=frozenset({"amx_fp16"}),
            before_measured=True,
            why="tiles of AMX, and all that reads each other in one call: ResNet-50 in 9.7 ms, "
            "in float32 24.6, eager 39.6; MobileNetV2 3.5, 7.6 and 16.2 (measured: 2 cores of a "
            "Xeon with AMX of float16, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "convolution",
            Level.O2,
            priority=70,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"amd", "avx512_bf16"}),
            before_measured=True,
            why="the CPU's own bfloat16 products, and all that reads each other in one call: "
            "MobileNetV2 4.3 ms, through oneDNN 8.1, EfficientNet-B0 7.6 and 11.9 (measured: "
            "a Xeon with its AMX left unused, torch 2.13; not yet on AMD)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "transposed_convolution",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16"}),
            training=False,
            why="a small convolution for each phase of the stride, weights laid out once with the "
            "BatchNorm in them; lines too, which oneDNN in torch does not take",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "transposed_convolution",
            Level.O2,
            priority=40,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            why="where the CPU does not multiply bfloat16 itself, it is computed in float32 from "
            "weights that were widened once",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "convolution",
            Level.O2,
            priority=40,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            why="where the CPU does not multiply bfloat16 itself, it is computed in float32 from "
            "weights that were widened once",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "product",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32"}),
            features=frozenset({"amd", "avx512f"}),
            min_flops=1 << 20,
            why="on AMD with AVX-512, MKL takes its generic path; operands are packed on the way, "
            "whatever their strides, in the forward and in the backward",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "training_convolution",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32"}),
            features=frozenset({"avx2"}),
            min_flops=1 << 20,
            why="3x3 kernels in tiles of 2x2 outputs take 0.5 to 0.8 of oneDNN's time, forward "
            "and backward, packing included (measured: one thread of Zen 3 and 4); on images "
            "channels last oneDNN's sums of more than 576 products are less exact than the "
            "contract allows, with AVX2 only those of gradients",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "weight_gradient",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32"}),
            features=frozenset({"avx2"}),
            min_flops=1 << 20,
            why="pixels are laid out once for all taps, a few hundred in a chain: 0.5 to 0.75 of "
            "oneDNN's time, mostly with a tenth of its error, which adds up all pixels one after "
            "another (measured: one thread of Zen 3, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "batch_norm",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32"}),
            min_ops=2,
            min_bytes=1 << 16,
            why="a few floats are added at a time, and their sums in double precision: as exact as "
            "eager's, where Inductor's gradients were six times as inexact, and faster than both",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "softmax",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32"}),
            min_bytes=1 << 16,
            min_ops=2,
            why="exponentials in line, the maxima of sixteen rows at once: where nothing before or "
            "behind it joins it, Inductor's loop takes 1.2 to 3 times as long as eager",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "group_norm",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16", "bfloat16"}),
            training=False,
            min_bytes=1 << 18,
            min_ops=2,
            why="two passes with the activation in the second, however images lie: channels last "
            "Inductor's loop gathers the channels of a group and takes up to four times as long "
            "(measured: one thread of Zen 5, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "random",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32"}),
            min_ops=2,
            min_bytes=1 << 12,
            why="sixteen counters at a time and all four numbers of each, where Inductor draws one "
            "number at a time: dropout takes a fifth of its time",
        ),
        CapabilityRow(
            "cpu",
            "mha",
            "attention",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16", "bfloat16"}),
            training=False,
            why="the products do not go through the BLAS of torch; grouped heads are read once; "
            "half precision is computed in float32, where torch rounds the scores, or in "
            "AMX's tiles where it has them for the dtype",
        ),
        CapabilityRow(
            "cpu",
            "openmp",
            "recurrent",
            Level.O2,
            priority=70,
            dtypes=frozenset({"float32", "float16", "bfloat16"}),
            training=False,
            early=True,
            why="all steps in one call with weights laid out once: eager's LSTM lays them out in "
            "every call, its GRU calls a dozen operators for each step; half precision is computed "
            "in float32 unless the CPU multiplies it itself",
        ),
        CapabilityRow(
            "cpu",
            "eager",
            "recurrent",
            Level.O1,
            priority=10,
            training=False,
            early=True,
            why="torch's own call; taken apart it would be some ten operators for each step",
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "linear",
            Level.O1,
            priority=60,
            dtypes=frozenset({"float32"}),
            training=False,
            features=frozenset({"amd", "avx512f"}),
            min_flops=4 << 20,
            why="on AMD with AVX-512 oneDNN is ahead of MKL: 469 against 207 GFLOP/s on Zen 5, 220 "
            "against 165 on Zen 4; with AVX2 only, MKL is level or ahead; below some million FLOPs "
            "the call costs more than it saves",
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "linear",
            Level.O1,
            priority=60,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"avx512_bf16"}),
            min_flops=4 << 20,
            why="oneDNN uses the CPU's own bfloat16 products: twice the rate of float32 on Zen 4",
        ),
        *(
            CapabilityRow(
                "cpu",
                "mkldnn",
                region,
                Level.O1,
                priority=priority,
                dtypes=frozenset({"float16"}),
                training=False,
                features=frozenset({"amx_fp16"}),
                min_flops=4 << 20,
                why="oneDNN multiplies float16 in AMX's tiles: a text encoder takes 16.5 ms, eager "
                "21.5, in float32 51; two transposed convolutions 0.8, ours in float32 2.6 "
                "(measured: 2 cores of a Xeon with AMX of float16, torch 2.13)",
            )
            for region, priority in _IN_TILES_OF_FLOAT16
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "convolution",
            Level.O1,
            priority=60,
            dtypes=frozenset({"float32"}),
            training=False,
            min_flops=4 << 20,
            why="eager's convolutions are oneDNN's too; here the weight is laid out once with the "
            "BatchNorm in it, and images stay channels last",
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "convolution",
            Level.O1,
            priority=60,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"avx512_bf16"}),
            min_flops=4 << 20,
            why="oneDNN uses the CPU's own bfloat16 products",
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "transposed_convolution",
            Level.O1,
            priority=60,
            dtypes=frozenset({"float32"}),
            training=False,
            min_flops=4 << 20,
            why="eager's are oneDNN's too, with the weight laid out anew in every call; here it is "
            "laid out once with the BatchNorm in it, and images stay channels last",
        ),
        CapabilityRow(
            "cpu",
            "mkldnn",
            "transposed_convolution",
            Level.O1,
            priority=60,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"avx512_bf16"}),
            min_flops=4 << 20,
            why="oneDNN uses the CPU's own bfloat16 products",
        ),
        *(
            CapabilityRow(
                "cpu",
                "mkldnn",
                region,
                Level.O1,
                priority=30,
                dtypes=frozenset({"float16", "bfloat16"}),
                training=False,
                features=frozenset({"avx2"}),
                min_flops=4 << 20,
                shape_classes=frozenset({"small", "large"}) if region == "linear" else None,
                why="what the CPU does not multiply itself is computed in float32 from weights "
                "that were widened once: 1.5 to 5 times as fast as eager in bfloat16, 5 to 70 "
                "times in float16 (a Xeon with AVX-512); one row would read twice the memory",
            )
            for region in ("linear", "convolution", "transposed_convolution")
        ),
        *(
            CapabilityRow(
                "cpu",
                "openmp",
                f"quantized_{layer}",
                Level.O2,
                priority=85,
                dtypes=frozenset({"uint8", "int8"}),
                training=False,
                features=frozenset({feature}),
                why="a call of oneDNN's takes 39 us before it computes, more than most layers: "
                "ResNet-50 takes 7.0 ms instead of 9.6, MobileNetV2 2.7 instead of 6.5 (measured: "
                "2 cores of a Xeon 6, torch 2.13)",
            )
            for layer in ("convolution", "linear")
            for feature in ("avx512_vnni", "avx_vnni")
        ),
        *(
            CapabilityRow(
                "cpu",
                "mkldnn",
                f"quantized_{layer}",
                Level.O1,
                priority=80,
                dtypes=frozenset({"uint8", "int8"}),
                training=False,
                features=frozenset({feature}),
                why="bytes are multiplied as bytes; without VNNI oneDNN's sums of two products "
                "end at 16 bits, so layers stay floats there",
            )
            for layer in ("convolution", "linear")
            for feature in ("avx512_vnni", "avx_vnni")
        ),
        CapabilityRow(
            "cpu",
            "mkl",
            "linear",
            Level.O1,
            priority=50,
            dtypes=frozenset({"float32"}),
            training=False,
            features=frozenset({"intel"}),
            min_flops=4 << 20,
            shape_classes=frozenset({"small", "large"}),
            why=f"MKL is at its best on Intel, and the weight {_LAID_OUT_ONCE}; {_MKL_ROWS}",
        ),
        CapabilityRow(
            "cpu",
            "mkl",
            "linear",
            Level.O1,
            priority=10,
            dtypes=frozenset({"float32"}),
            training=False,
            min_flops=4 << 20,
            shape_classes=frozenset({"small", "large"}),
            only_if_measured=True,
            why=f"on AMD packed and plain MKL are level, within a tenth; {_MKL_ROWS}",
        ),
        CapabilityRow(
            "cpu",
            "nnpack",
            "convolution",
            Level.O3,
            priority=20,
            dtypes=frozenset({"float32"}),
            training=False,
            min_flops=4 << 20,
            shape_classes=frozenset({"spatial"}),
            only_if_measured=True,
            why="3x3 by Winograd: 1.3 ms at 64 channels of 56x56 where oneDNN's direct way takes "
            "2.2, and an error of some 1e-5 where eager's is 3e-7, which O1 and O2 do not allow "
            "(measured: one thread of Zen 4)",
        ),
        CapabilityRow(
            "cpu",
            "nnpack",
            "convolution",
            Level.O1,
            priority=80,
            dtypes=frozenset({"float32"}),
            training=False,
            min_flops=64 << 20,
            shape_classes=frozenset({"wide"}),
            why="kernels from 4x4 on by Fourier's transform, whose error is eager's own: 5x5 with "
            "64 channels of 56x56 takes 2.3 ms where the fastest direct way takes 7.3 (measured: "
            "one thread of Zen 4, and only with one thread is it used)",
        ),
        CapabilityRow(
            "cpu",
            "eager",
            "from_weights",
            Level.O1,
            priority=60,
            training=False,
            subclasses=False,
            early=True,
            why="what depends on weights alone is computed once, and again when one of them "
            "changed: BiT, whose weights are standardised, takes 38 ms where it took 77, since its "
            "convolutions can be packed then (measured: one thread of Zen 4, torch 2.13)",
        ),
        CapabilityRow(
            "cpu",
            "eager",
            "branches",
            Level.O1,
            priority=60,
            dtypes=frozenset({"float32", "float64"}),
            training=False,
            subclasses=False,
            early=True,
            why="convolutions of one image that are summed up are one convolution with the sum of "
            "their kernels: MobileOne-S0 takes 9.9 ms where it took 21.6, RepVGG-A0 12.1 where it "
            "took 14.1 (measured: 2 cores of Zen 4, torch 2.13)",
        ),
        _resampling("inductor", Level.O2, 70, training=True, why=_COPIES),
        # In training from O2 on: at O1 autograd itself runs the graph, gradients of gradients too.
        _resampling("eager", Level.O1, 60, training=False, why=_NUMBER_BY_NUMBER),
        _resampling("eager", Level.O2, 60, training=True, why=_NUMBER_BY_NUMBER),
        CapabilityRow(
            "cpu",
            "opt_einsum",
            "einsum",
            Level.O1,
            priority=60,
            dtypes=frozenset({"float32", "float64", "bfloat16", "complex64", "complex128"}),
            subclasses=False,
            early=True,
            why="the order decides the FLOPs (4 or 82 thousand for ij,jk,kl->il with sizes 64, 8, "
            "64, 2) and nothing else but the order of sums; not float16, whose range another "
            "order may leave",
        ),
        CapabilityRow(
            "cpu",
            "ipex",
            "attention",
            Level.O1,
            priority=80,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"avx512_bf16"}),
            why="multiplies in bfloat16, where ours widens: 12 heads of 512 take "
            "3.1 ms, ours 4.9, torch's 6.9; in float32 it is torch's own kernel (measured: 2 cores "
            "of Zen 4, torch 2.8)",
        ),
        CapabilityRow(
            "cpu",
            "ipex",
            "linear",
            Level.O1,
            priority=55,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"avx512_bf16"}),
            min_flops=4 << 20,
            why=_SAME_ONEDNN,
        ),
        CapabilityRow(
            "cpu",
            "ipex",
            "linear",
            Level.O1,
            priority=45,
            dtypes=frozenset({"float32"}),
            training=False,
            features=frozenset({"avx512f"}),
            min_flops=4 << 20,
            shape_classes=frozenset({"small", "large"}),
            why=f"{_SAME_ONEDNN}; on Intel MKL comes first, as it does in IPEX itself: {_MKL_ROWS}",
        ),
        CapabilityRow(
            "cpu",
            "ipex",
            "convolution",
            Level.O1,
            priority=55,
            dtypes=frozenset({"bfloat16"}),
            training=False,
            features=frozenset({"avx512_bf16"}),
            min_flops=4 << 20,
            why=_SAME_ONEDNN,
        ),
        CapabilityRow(
            "cpu",
            "ipex",
            "convolution",
            Level.O1,
            priority=45,
            dtypes=frozenset({"float32"}),
            training=False,
            features=frozenset({"avx512f"}),
            min_flops=4 << 20,
            why=_SAME_ONEDNN,
        ),
        CapabilityRow("cpu", "eager", GRAPH, Level.O0, why="takes everything that torch takes"),
    ),
)
