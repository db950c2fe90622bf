"""A state-space model with the layout of Mamba: gated blocks around a selective scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear, silu, softplus

from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 32000
    width: int = 512
    states: int = 16
    kernel: int = 4
    layers: int = 8
    tokens: int = 128


BASE = Sizes()
SMALL = Sizes(vocabulary=64, width=32, states=4, layers=2, tokens=12)


def scan(decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """state[t] = decay[t] * state[t - 1] + update[t] along dimension 1, in log2(length) steps.

    Each step joins every stretch of time with the one before it, so the stretches double.
    """
    stretch = 1
    while stretch < update.shape[1]:
        joined = update[:, stretch:] + decay[:, stretch:] * update[:, :-stretch]
        update = torch.cat((update[:, :stretch], joined), dim=1)
        joined = decay[:, stretch:] * decay[:, :-stretch]
        decay = torch.cat((decay[:, :stretch], joined), dim=1)
        stretch *= 2
    return update


class Mixer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inner, rank = 2 * sizes.width, max(sizes.width // 16, 1)
        self.parts = (rank, sizes.states, sizes.states)
        self.enter = nn.Linear(sizes.width, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(
            inner, inner, sizes.kernel, padding=sizes.kernel - 1, groups=inner
        )
        self.select = nn.Linear(inner, sum(self.parts), bias=False)
        self.step = nn.Linear(rank, inner, bias=False)
        self.leave = nn.Linear(inner, sizes.width, bias=False)
        self.step_bias = nn.Parameter(torch.empty(inner))
        self.log_rate = nn.Parameter(torch.empty(inner, sizes.states))
        self.skip = nn.Parameter(torch.empty(inner))

    def draw_own(self) -> None:
        self.step_bias.uniform_(-4.0, -1.0)  # steps of 0.02 to 0.3 after the softplus
        rates = torch.arange(1, self.log_rate.shape[1] + 1)
        self.log_rate.copy_(rates.log().expand_as(self.log_rate))
        self.skip.normal_(mean=1.0, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.enter(x).chunk(2, dim=-1)
        x = self.convolution(x.transpose(1, 2))[..., : x.shape[1]]
        x = silu(x.transpose(1, 2))
        return self.leave((self._remember(x) + self.skip * x) * silu(gate))

    def _remember(self, x: torch.Tensor) -> torch.Tensor:
        """How long a state lasts, what enters it and what is read depend on `x`."""
        step, write, read = self.select(x).split(self.parts, dim=-1)
        step = softplus(self.step(step) + self.step_bias)
        decay = torch.exp(step[..., None] * -torch.exp(self.log_rate))
        state = scan(decay, (step * x)[..., None] * write[:, :, None, :])
        return torch.matmul(state, read[..., None]).squeeze(-1)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.mixer = Mixer(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class StateSpace(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.Sequential(*(Layer(sizes) for _ in range(sizes.layers)))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the token that comes next."""
        x = self.layers(self.tokens(tokens))
        return linear(self.norm(x[:, -1:]), self.tokens.weight)


def state_space(small: bool = False) -> Case:
    sizes = SMALL if small else BASE
    model = draw(StateSpace(sizes))
    return Case(model, (torch.randint(sizes.vocabulary, (1, sizes.tokens)),))


WORKLOADS = (
    Workload(
        "state-space",
        state_space,
        "Mamba, small: width 512, 8 layers, 16 states, prompt of 128 tokens, scan by doubling",
    ),
)
