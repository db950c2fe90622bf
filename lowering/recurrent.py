"""LSTM, GRU and plain recurrent layers as an operator that stays whole: torch computes it.

Taken apart, each step of the sequence is some ten operators of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowering import observing

_library = torch.library.Library("kernel_dispatch", "FRAGMENT")
_FUNCTIONS: dict[str, Any] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


def _layers(
    kind: str,
    x: Tensor,
    lengths: Tensor | None,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    observing.region_ran("recurrent", "eager")
    hidden = list(state) if kind == "lstm" else state[0]
    rest = (list(weights), biases, layers, dropout, training, bidirectional)
    if lengths is None:
        results = _FUNCTIONS[kind](x, hidden, *rest, batch_first)
    else:
        results = _FUNCTIONS[kind](x, lengths, hidden, *rest)
    return [_laid_as_promised(result, batch_first and i == 0) for i, result in enumerate(results)]


def _laid_as_promised(result: Tensor, batch_first: bool) -> Tensor:
    """Step by step in memory. Torch's kernels do so already, mostly; compiled code relies on it."""
    return (
        result.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else result.contiguous()
    )


def results_like(
    x: Tensor, state: Sequence[Tensor], bidirectional: bool, batch_first: bool
) -> list[Tensor]:
    """What torch's functions return, by its sizes and strides alone."""
    first = x.transpose(0, 1) if batch_first else x
    size = state[0].shape[-1] * (2 if bidirectional else 1)
    out = x.new_empty((*first.shape[:-1], size))
    return [
        out.transpose(0, 1) if batch_first else out,
        *(x.new_empty(tensor.shape) for tensor in state),
    ]


def _like_layers(
    kind: str, x: Tensor, lengths: Tensor | None, state: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    *_, bidirectional, batch_first = rest
    return results_like(x, state, bidirectional, batch_first)


_library.define(
    "recurrent(str kind, Tensor x, Tensor? lengths, Tensor[] state, Tensor[] weights, bool biases, "
    "int layers, float dropout, bool training, bool bidirectional, bool batch_first) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),  # dropout between the layers
)
_library.impl("recurrent", _layers, "CompositeExplicitAutograd")
torch.library.register_fake("kernel_dispatch::recurrent", _like_layers, lib=_library)

layers = torch.ops.kernel_dispatch.recurrent.default
