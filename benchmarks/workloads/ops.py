"""Single operations and short regions, in the sizes that transformers and CNNs give them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads.cnn import convolution
from benchmarks.workloads.initial_weights import RELU_GAIN, draw
from benchmarks.workloads.llama import SwiGLU
from benchmarks.workloads.rotary import RotaryTable, rotate
from kernel_dispatch.bench import Case, Workload

WIDTH, HEADS, TOKENS = 768, 12, 128
SMALL_WIDTH, SMALL_HEADS, SMALL_TOKENS = 32, 4, 6
HEAD_WIDTH = WIDTH // HEADS
SMALL_HEAD_WIDTH = SMALL_WIDTH // SMALL_HEADS


def linear(small: bool = False) -> Case:
    width = SMALL_WIDTH if small else WIDTH
    return Case(draw(nn.Linear(width, 4 * width)), (_hidden(small),))


def linear_gelu(small: bool = False) -> Case:
    width = SMALL_WIDTH if small else WIDTH
    return Case(draw(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())), (_hidden(small),))


class LinearResidual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.linear(x)


def linear_residual(small: bool = False) -> Case:
    width, tokens = (SMALL_WIDTH, SMALL_TOKENS) if small else (WIDTH, TOKENS)
    model = draw(LinearResidual(4 * width, width))
    return Case(model, (torch.randn(1, tokens, 4 * width), torch.randn(1, tokens, width)))


def mlp_swiglu(small: bool = False) -> Case:
    width, tokens = (SMALL_WIDTH, SMALL_TOKENS) if small else (WIDTH, 32)
    return Case(draw(SwiGLU(width, 4 * width)), (torch.randn(1, tokens, width),))


def conv_bn_relu(small: bool = False) -> Case:
    channels, side = (8, 10) if small else (64, 56)
    model = nn.Sequential(convolution(channels, channels, 3), nn.ReLU())
    return Case(draw(model, RELU_GAIN), (torch.randn(1, channels, side, side),))


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def attention(small: bool = False) -> Case:
    shape = (1, SMALL_HEADS, 12, SMALL_HEAD_WIDTH) if small else (1, HEADS, 512, HEAD_WIDTH)
    return Case(causal_attention, tuple(torch.randn(shape) for _ in range(3)))


def full_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def attention_decode(small: bool = False) -> Case:
    heads, width, cached = (
        (SMALL_HEADS, SMALL_HEAD_WIDTH, 12) if small else (HEADS, HEAD_WIDTH, 1024)
    )
    query = torch.randn(1, heads, 1, width)
    key, value = (torch.randn(1, heads, cached, width) for _ in range(2))
    return Case(full_attention, (query, key, value))


def layer_norm(small: bool = False) -> Case:
    width, tokens = (SMALL_WIDTH, SMALL_TOKENS) if small else (WIDTH, 512)
    return Case(draw(nn.LayerNorm(width)), (torch.randn(1, tokens, width),))


class RMSNormResidual(nn.Module):
    """The sum and its norm, as decoders write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def draw_own(self) -> None:
        self.weight.normal_(mean=1.0, std=0.1)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (total * scale), total


def rms_norm_residual(small: bool = False) -> Case:
    width, tokens = (SMALL_WIDTH, SMALL_TOKENS) if small else (WIDTH, 512)
    model = draw(RMSNormResidual(width))
    return Case(model, (torch.randn(1, tokens, width), torch.randn(1, tokens, width)))


class RotatedPair(nn.Module):
    def __init__(self, tokens: int, head_width: int) -> None:
        super().__init__()
        self.table = RotaryTable(tokens, head_width)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotation = self.table.cosines, self.table.sines
        return rotate(query, rotation), rotate(key, rotation)


def rope(small: bool = False) -> Case:
    heads, width, tokens = (
        (SMALL_HEADS, SMALL_HEAD_WIDTH, SMALL_TOKENS) if small else (HEADS, HEAD_WIDTH, 512)
    )
    query, key = (torch.randn(1, heads, tokens, width) for _ in range(2))
    return Case(RotatedPair(tokens, width).eval(), (query, key))


def last_softmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1)


def softmax(small: bool = False) -> Case:
    shape = (1, SMALL_HEADS, 8, 8) if small else (1, HEADS, 256, 256)
    return Case(last_softmax, (3 * torch.randn(shape),))


def embedding(small: bool = False) -> Case:
    rows, width, tokens = (50, SMALL_WIDTH, 8) if small else (30522, WIDTH, 512)
    return Case(draw(nn.Embedding(rows, width)), (torch.randint(rows, (4, tokens)),))


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets)


def cross_entropy(small: bool = False) -> Case:
    tokens, classes = (12, 50) if small else (128, 32000)
    return Case(mean_loss, (torch.randn(tokens, classes), torch.randint(classes, (tokens,))))


def scores_of_heads(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", query, key)


def einsum(small: bool = False) -> Case:
    shape = (1, SMALL_TOKENS, SMALL_HEADS, SMALL_HEAD_WIDTH) if small else (1, 256, HEADS, 64)
    return Case(scores_of_heads, (torch.randn(shape), torch.randn(shape)))


def _hidden(small: bool) -> torch.Tensor:
    shape = (1, SMALL_TOKENS, SMALL_WIDTH) if small else (1, TOKENS, WIDTH)
    return torch.randn(shape)


WORKLOADS = (
    Workload("linear", linear, "768 to 3072, 128 tokens", "op"),
    Workload("linear-gelu", linear_gelu, "768 to 3072 and GELU, 128 tokens", "op"),
    Workload("linear-residual", linear_residual, "3072 to 768 and a sum, 128 tokens", "op"),
    Workload("mlp-swiglu", mlp_swiglu, "768 to 3072 twice, gated, and back, 32 tokens", "op"),
    Workload("conv-bn-relu", conv_bn_relu, "3x3, 64 to 64 channels of 56x56", "op"),
    Workload("attention", attention, "causal, 12 heads of 64, 512 tokens", "op"),
    Workload(
        "attention-decode",
        attention_decode,
        "one query, 1024 cached tokens, 12 heads of 64",
        "op",
        trains=False,
    ),
    Workload("layer-norm", layer_norm, "512 tokens of width 768", "op"),
    Workload(
        "rms-norm-residual", rms_norm_residual, "a sum and its norm, 512 tokens of width 768", "op"
    ),
    Workload("rope", rope, "query and key of 512 tokens, 12 heads of 64", "op"),
    Workload("softmax", softmax, "12 heads of 256x256 scores", "op"),
    Workload("embedding", embedding, "4x512 of 30522 rows of width 768", "op"),
    Workload("cross-entropy", cross_entropy, "128 tokens, 32000 classes", "op"),
    Workload("einsum", einsum, "bqhd,bkhd->bhqk: 256 tokens, 12 heads of 64", "op"),
)
