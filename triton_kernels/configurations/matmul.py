"""Matrix products: tiles by architecture and by how much work there is, and splits over the depth.

Tiles are written down for two-byte numbers, the largest first. One-byte numbers are read twice as
deep at a time and four-byte ones half as deep, which is the same shared memory. The first of a
list that still gives nearly every unit of the card a tile is the best guess.
"""

from __future__ import annotations

from dataclasses import replace

from triton_kernels.architectures import Architecture
from triton_kernels.configurations import Config, power_of_two

# Up to this many rows are multiplied number by number: with more the memory would wait for it.
VECTOR_ROWS = 4
# At most so many partial results for each output, each of at least so many products.
MOST_SPLITS = 16
SHORTEST_SPLIT = 256

# Tiles of the combining kernel, and of the one that goes back through an epilogue.
COMBINE = Config({"BLOCK_M": 4, "BLOCK_N": 128}, warps=4)
BACKWARD = Config({"ROWS": 8, "BLOCK": 256}, warps=4)


def _tile(
    rows: int, columns: int, depth: int, warps: int, stages: int, parts: int = 1, **more: int
) -> Config:
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth, "GROUP": 8, "PARTS": parts}
    return Config(sizes, warps, stages, **more)


_TILES = {
    "sm80": (
        _tile(128, 256, 32, 8, 3, parts=4),
        _tile(128, 128, 32, 8, 4, parts=2),
        _tile(64, 128, 64, 4, 3, parts=2),
        _tile(64, 64, 64, 4, 4),
        _tile(32, 64, 128, 4, 3),
        _tile(16, 64, 128, 4, 4),
        _tile(16, 32, 128, 2, 4),
    ),
    "sm90": (
        _tile(128, 256, 64, 8, 3, parts=4),
        _tile(128, 128, 64, 8, 4, parts=2),
        _tile(64, 128, 64, 4, 4, parts=2),
        _tile(64, 64, 64, 4, 5),
        _tile(32, 64, 128, 4, 4),
        _tile(16, 64, 128, 4, 4),
        _tile(16, 32, 128, 2, 5),
    ),
    "sm100": (
        _tile(128, 256, 64, 8, 4, parts=8),
        _tile(128, 128, 64, 4, 4, parts=4),
        _tile(64, 128, 64, 4, 4, parts=2),
        _tile(64, 64, 64, 4, 5),
        _tile(32, 64, 64, 4, 6),
        _tile(16, 64, 64, 4, 6),
        _tile(16, 32, 128, 2, 5),
    ),
    "gfx90a": (
        _tile(128, 128, 32, 4, 2, parts=2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(64, 128, 32, 4, 2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(64, 64, 64, 4, 2, matrix_instr_nonkdim=16),
        _tile(32, 64, 64, 4, 2, matrix_instr_nonkdim=16),
        _tile(16, 64, 128, 4, 2, matrix_instr_nonkdim=16),
        _tile(16, 32, 128, 2, 2, matrix_instr_nonkdim=16),
    ),
    "gfx942": (
        _tile(128, 256, 64, 8, 2, parts=2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(128, 128, 64, 4, 2, parts=2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(64, 128, 64, 4, 2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(64, 64, 64, 4, 2, matrix_instr_nonkdim=16),
        _tile(32, 64, 64, 4, 2, matrix_instr_nonkdim=16),
        _tile(16, 64, 128, 4, 2, matrix_instr_nonkdim=16),
        _tile(16, 32, 128, 2, 2, matrix_instr_nonkdim=16),
    ),
    "gfx950": (
        _tile(128, 256, 64, 8, 2, parts=2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(128, 128, 64, 4, 2, parts=2, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(64, 128, 64, 4, 3, waves_per_eu=2, matrix_instr_nonkdim=16),
        _tile(64, 64, 128, 4, 2, matrix_instr_nonkdim=16),
        _tile(32, 64, 128, 4, 2, matrix_instr_nonkdim=16),
        _tile(16, 64, 128, 4, 3, matrix_instr_nonkdim=16),
        _tile(16, 32, 128, 2, 3, matrix_instr_nonkdim=16),
    ),
    "gfx1100": (
        _tile(128, 128, 32, 8, 2, parts=2),
        _tile(64, 128, 32, 4, 2, parts=2),
        _tile(64, 64, 32, 4, 2),
        _tile(32, 64, 64, 4, 2),
        _tile(16, 64, 64, 4, 2),
        _tile(16, 32, 64, 2, 2),
    ),
}
# Without matrix units for the dtype: what one thread adds up has to fit beside what it multiplies.
_BY_LANES = (
    _tile(64, 64, 16, 8, 3),
    _tile(32, 64, 32, 4, 3),
    _tile(16, 64, 32, 4, 3),
    _tile(16, 32, 32, 4, 3),
)
_LIKE = {"sm86": "sm80", "sm89": "sm80", "sm120": "sm80"}  # whose tiles a card without a list takes


def tiled(
    architecture: Architecture,
    sizes: tuple[int, int, int, int],
    bytes_in: int,
    bytes_out: int,
    *,
    is_aligned: bool,
    by_lanes: bool,
    is_fp8: bool,
) -> tuple[Config, ...]:
    """For a product of these (batches, rows, columns, depth). `is_aligned`: rows of both begin at
    multiples of 16 bytes. `by_lanes`: no matrix unit multiplies the dtype."""
    batches, rows, columns, _ = sizes
    known = _BY_LANES if by_lanes else _TILES[_LIKE.get(architecture.name, architecture.name)]
    if is_fp8 and architecture.name == "sm90":
        known = known[1:]  # two sums for each output, an exact one and that of the matrix units
    most_rows, most_columns = power_of_two(rows, 16), power_of_two(columns, 32)
    least_rows = min(32, most_rows // 2)
    fitting = [
        one
        for one in known
        if least_rows <= one["BLOCK_M"] <= most_rows and one["BLOCK_N"] <= most_columns
    ] or [known[-1]]
    full = (
        index
        for index, one in enumerate(fitting)
        if 4 * programs(one, batches, rows, columns) >= 3 * architecture.units
    )
    first = next(full, len(fitting) - 1)
    nearby = fitting[first : first + 2]
    return tuple(
        one if by_lanes else _of_bytes(one, bytes_in, bytes_out, is_aligned) for one in nearby
    )


def _of_bytes(config: Config, bytes_in: int, bytes_out: int, is_aligned: bool) -> Config:
    depth = config["BLOCK_K"]
    if not is_aligned:  # read number by number, which takes a register for each address
        depth = min(depth, 32)
    parts = config["PARTS"] * (2 if max(bytes_in, bytes_out) > 2 else 1)
    sizes = {"BLOCK_K": max(16, depth * 2 // bytes_in), "PARTS": parts}
    return replace(config, tiles={**config.tiles, **sizes})


def vector(architecture: Architecture, rows: int, itemsize: int, deep: bool) -> tuple[Config, ...]:
    """For few rows. `deep`: neighbours along the depth of b lie side by side, else its columns."""
    kept = power_of_two(rows)
    several = 2 if kept == 1 else 1
    if deep:
        part = 512 // itemsize * several
        return (
            Config({"ROWS": kept, "BLOCK_N": 8, "BLOCK_K": part}, warps=4, stages=3),
            Config({"ROWS": kept, "BLOCK_N": 4, "BLOCK_K": 2 * part}, warps=4, stages=3),
        )
    part = 16 * several
    return (
        Config({"ROWS": kept, "BLOCK_N": 256 // itemsize, "BLOCK_K": part}, warps=4, stages=3),
        Config({"ROWS": kept, "BLOCK_N": 128 // itemsize, "BLOCK_K": part}, warps=2, stages=3),
    )


def programs(config: Config, batches: int, rows: int, columns: int) -> int:
    """How many programs take a tile each."""
    down = -(-rows // config.tiles.get("BLOCK_M", config.tiles.get("ROWS", 1)))
    return batches * down * -(-columns // config["BLOCK_N"])


def splits(architecture: Architecture, tiles: int, depth: int) -> int:
    """In how many parts the depth is summed, so that units without a tile have work too."""
    wanted = 2 * architecture.units // max(1, tiles)
    most = min(wanted, depth // SHORTEST_SPLIT, MOST_SPLITS)
    return 1 << (max(1, most).bit_length() - 1)


def backward_programs(architecture: Architecture, row_tiles: int) -> int:
    """How many programs share the rows on the way back: each sums a bias gradient of its own."""
    return max(1, min(row_tiles, architecture.units))
