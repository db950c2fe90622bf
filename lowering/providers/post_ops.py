"""Activations behind oneDNN's layers, as torch's operators of it take them."""

from __future__ import annotations

from typing import Any

import torch

from lowering.regions.epilogue import Abilities

# Our name of an activation -> oneDNN's in torch, and its algorithm.
_ATTRIBUTES = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "gelu_erf": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "sigmoid": ("sigmoid", ""),
    "hardswish": ("hardswish", ""),
    "hardsigmoid": ("hardsigmoid", ""),
    "clamp": ("hardtanh", ""),
    "leaky_relu": ("leaky_relu", ""),
}
_NUMBERS = {"clamp": 2, "leaky_relu": 1}

ABILITIES = Abilities(activations=frozenset(_ATTRIBUTES) - {"none"})


def of(activation: str, a: float, b: float) -> tuple[str, list[float], str]:
    """An activation as oneDNN's operators in torch take it."""
    name, algorithm = _ATTRIBUTES[activation]
    return name, [a, b][: _NUMBERS.get(activation, 0)], algorithm


def activated(out: torch.Tensor, activation: str, a: float, b: float) -> torch.Tensor:
    """The meaning of an activation's name in plain torch, for what oneDNN does not take."""
    functional = torch.nn.functional
    plain: dict[str, Any] = {
        "none": lambda: out,
        "relu": lambda: functional.relu(out),
        "gelu_erf": lambda: functional.gelu(out),
        "gelu_tanh": lambda: functional.gelu(out, approximate="tanh"),
        "silu": lambda: functional.silu(out),
        "tanh": lambda: torch.tanh(out),
        "sigmoid": lambda: torch.sigmoid(out),
        "hardswish": lambda: functional.hardswish(out),
        "hardsigmoid": lambda: functional.hardsigmoid(out),
        "clamp": lambda: torch.clamp(out, a, b),
        "leaky_relu": lambda: functional.leaky_relu(out, a),
    }
    return plain[activation]()
