from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "a masked step lets one more number of the depth in",
        "            is_in = inner < depth - step * BLOCK_K\n            a = tl.load",
        "            is_in = inner <= depth - step * BLOCK_K\n            a = tl.load",
    ),
    Bug(
        "columns of b are found as if they lay side by side",
        "(column % columns).to(tl.int64)[None, :] * b_column",
        "(column % columns).to(tl.int64)[None, :]",
    ),
    Bug(
        "sums of half precision numbers are kept in half precision",
        "    total = total.to(tl.float32)\n    _finish_in_parts(",
        "    total = total.to(a_ptr.dtype.element_ty).to(tl.float32)\n    _finish_in_parts(",
    ),
    Bug(
        "the last part of a divided depth is not added",
        "for split in range(splits):",
        "for split in range(splits - 1):",
    ),
    Bug(
        "each batch takes the matrix of the first",
        "b_at = batch * b_batch + (column",
        "b_at = 0 * b_batch + (column",
    ),
    Bug(
        "the right part of a tile is stored over the left one",
        "right, batch, row, column + BLOCK_N // 2, out_ptr",
        "right, batch, row, column, out_ptr",
    ),
    Bug(
        "a gate multiplies before the activation on the way back",
        "grad_gate = grad * _activated(pre, ACTIVATION)",
        "grad_gate = grad * pre",
    ),
    Bug(
        "rows on the way back are those of the first batch",
        "batch, row = line // rows, line % rows",
        "batch, row = line * 0, line % rows",
    ),
    Bug(
        "relu drops NaN",
        'if ACTIVATION == "relu":\n        x = tl.where(x < 0, 0.0, x)',
        'if ACTIVATION == "relu":\n        x = tl.where(x > 0, x, 0.0)',
    ),
]
