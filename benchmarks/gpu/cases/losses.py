"""Losses over vocabularies: the rows are longer than registers, the logits larger than all else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.case import FORWARD, STEP, Case, Inputs, Shape, Targets, Work, ours, randn
from benchmarks.gpu.rivals import MAX_AUTOTUNE, liger

IGNORED = -100


def logits_and_target(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    rows, classes = shape
    # As sharp as those of a trained model: flat logits would hide what is lost at the true class.
    logits = randn(rows, classes, dtype=dtype, device=device, scale=3.0)
    return logits, targets(rows, classes, device)


def targets(rows: int, classes: int, device: str) -> Tensor:
    target = torch.randint(classes, (rows,), device=device)
    target[1::7] = IGNORED
    return target


def loss_work(shape: Shape, size: int, direction: str) -> Work:
    rows, classes = shape
    return Work(rows * classes * size * (1 if direction == FORWARD else 2))


def hidden_and_weight(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    tokens, width, classes = shape
    hidden = randn(tokens, width, dtype=dtype, device=device)
    weight = randn(classes, width, dtype=dtype, device=device, scale=width**-0.5)
    return hidden, weight, targets(tokens, classes, device)


def own_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), target)


def linear_loss_work(shape: Shape, size: int, direction: str) -> Work:
    """Three products in a step; hidden, weight and both gradients moved once."""
    tokens, width, classes = shape
    least = 2 * (tokens + classes) * width * size
    return Work(least, 2.0 * tokens * width * classes * (1 if direction == FORWARD else 3))


def reduced(reduction: str, **more: Any) -> Any:
    return lambda logits, target: ours("cross_entropy")(logits, target, reduction=reduction, **more)


PUBLISHED = (8192, 4096, 128256)  # the shape that others publish figures for

CASES = (
    Case(
        "cross_entropy",
        "cross_entropy",
        logits_and_target,
        reduced("mean"),
        functional.cross_entropy,
        loss_work,
        ((8192, 128256), (4096, 32000), (16384, 50257)),
        ((100, 1000), (33, 151937), (1, 2)),
        tiny=(6, 50),
        rivals=(liger("cross_entropy", lambda f: f.liger_cross_entropy, clones=True),),
        targets=Targets(
            copy_share=0.9, backward_copy_share=0.9, rival=MAX_AUTOTUNE, times_rival=1.03
        ),
        checks_usual=False,
    ),
    Case(
        "cross_entropy_of_rows",
        "cross_entropy",
        logits_and_target,
        reduced("none", label_smoothing=0.1),
        lambda x, t: functional.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
        loss_work,
        ((4096, 32000),),
        ((100, 1000), (33, 151937)),
        tiny=(6, 50),
        huge=(20_000, 128256),
        rows_of=(0, 1),
        targets=Targets(copy_share=0.9, backward_copy_share=0.9),
        checks_usual=False,
    ),
    Case(
        "linear_cross_entropy",
        "linear_cross_entropy",
        hidden_and_weight,
        ours("linear_cross_entropy"),
        own_linear_cross_entropy,
        linear_loss_work,
        (PUBLISHED, (1024, 4096, 128256), (8192, 2048, 32000)),
        ((2048, 1024, 50257), (777, 768, 30522)),
        tiny=(20, 16, 37),
        directions=(STEP,),
        rivals=(
            liger(
                "fused_linear_cross_entropy",
                lambda f: (
                    lambda hidden, weight, target: f.liger_fused_linear_cross_entropy(
                        hidden, weight, target
                    )
                ),
                clones=True,
            ),
        ),
        targets=Targets(milliseconds=40.0, share_of_eagers_memory=1 / 6, at=PUBLISHED),
        layouts=("plain", "sliced"),
        checks_usual=False,
    ),
)
