"""Linear cross entropy: how many tokens have logits at the same time."""

from __future__ import annotations

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config

# The logits of one chunk take about this many bytes,
CHUNK_BYTES = 512 << 20
# or half of what the gradient of the weight takes in float32: each chunk reads and writes all of
# that, so fewer chunks are faster,
OF_GRADIENT = 2
# but it has at least this many tokens: with fewer, the matrix products wait for memory.
FEWEST_TOKENS = 1024
# Tokens of a chunk are a multiple of this, as the tiles of matrix products are.
_TILE = 128


def chunk(tokens: int, classes: int, features: int, bytes_of_a_logit: int) -> int:
    """Tokens for each chunk: all chunks alike, so that the last one is no remnant. `features` of a
    weight that wants a gradient, else 0."""
    largest = max(CHUNK_BYTES, OF_GRADIENT * classes * features)
    most = max(FEWEST_TOKENS, largest // max(1, classes * bytes_of_a_logit))
    chunks = max(1, -(-tokens // (most // _TILE * _TILE)))
    return max(1, -(-tokens // (chunks * _TILE)) * _TILE)


def scaled(architecture: Architecture) -> tuple[Config, ...]:
    """16 numbers for each lane."""
    return (Config({"BLOCK": 4096}, warps=256 // architecture.lanes),)
