"""A decoder with the layout of Mixtral, small: every token goes through two of eight experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import silu

from benchmarks.workloads.initial_weights import draw
from benchmarks.workloads.llama import GroupedAttention
from benchmarks.workloads.rotary import RotaryTable
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 32000
    width: int = 512
    hidden: int = 1024
    heads: int = 8
    key_heads: int = 2
    layers: int = 4
    experts: int = 8
    chosen: int = 2
    tokens: int = 128


BASE = Sizes()
SMALL = Sizes(64, 32, 48, heads=4, key_heads=2, layers=2, experts=4, tokens=12)


class Experts(nn.Module):
    """All experts see all tokens, and the router's choice weighs what they say.

    Four times the arithmetic of sending tokens around, but no shape depends on the data, so the
    whole model is one graph.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.chosen = sizes.chosen
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(sizes.experts, sizes.width, 2 * sizes.hidden))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.width))

    def draw_own(self) -> None:
        for weight in (self.gate_up, self.down):
            weight.normal_(std=weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        gate, up = torch.matmul(tokens, self.gate_up).chunk(2, dim=-1)
        answers = torch.bmm(silu(gate) * up, self.down)
        return torch.einsum("te,etw->tw", self._shares(tokens), answers).view_as(x)

    def _shares(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.router(tokens)
        best, experts = scores.topk(self.chosen, dim=-1)
        return torch.zeros_like(scores).scatter(-1, experts, best.softmax(-1))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = GroupedAttention(sizes.width, sizes.heads, sizes.key_heads)
        self.experts_norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.experts = Experts(sizes)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.experts(self.experts_norm(x))


class MixtureOfExperts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.rotary = RotaryTable(sizes.tokens, sizes.width // sizes.heads)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the token that comes next."""
        x = self.tokens(tokens)
        rotation = self.rotary(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x[:, -1:]))


def mixture_of_experts(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    model = draw(MixtureOfExperts(sizes))
    return Case(model, (torch.randint(sizes.vocabulary, (1, sizes.tokens)),))


WORKLOADS = (
    Workload(
        "mixture-of-experts",
        mixture_of_experts,
        "Mixtral, small: width 512, 4 layers, top 2 of 8 experts of 1024, prompt of 128 tokens",
    ),
)
