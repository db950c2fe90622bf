from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "padded columns count as zeros",
        'return tl.where(is_in, x, float("-inf"))',
        "return tl.where(is_in, x, 0.0)",
    ),
    Bug(
        "two of the sizes that count rows are swapped",
        "return (outer // size_b).to(tl.int64), (outer % size_b).to(tl.int64), c",
        "return (outer % size_b).to(tl.int64), (outer // size_b).to(tl.int64), c",
    ),
    Bug(
        "a mask is read as x lies",
        "mask_ptrs += column * mask_column",
        "mask_ptrs += column * x_column",
    ),
    Bug(
        "the sum so far is not scaled when a higher score comes",
        "total = total * tl.exp(highest - shift) + ",
        "total = total + ",
    ),
    Bug(
        "a part of minus infinity is shifted by it",
        'shift = tl.where(higher == float("-inf"), 0.0, higher)',
        "shift = higher",
    ),
    Bug(
        "the backward forgets the scale",
        "out_ptrs = out_ptr + (a * out_a + b * out_b + c * out_c)[:, None] + column * out_column\n"
        "    tl.store(out_ptrs, (grad_x * scale)",
        "out_ptrs = out_ptr + (a * out_a + b * out_b + c * out_c)[:, None] + column * out_column\n"
        "    tl.store(out_ptrs, (grad_x * 1.0)",
    ),
    Bug(
        "gradients go through a mask in wide rows",
        "grad_x = tl.where(allowed, grad_x, 0.0)",
        "grad_x = tl.where(is_in, grad_x, 0.0)",
    ),
    Bug(
        "dimensions are counted as one whose strides do not allow it",
        "joins = groups and all(",
        "joins = groups and any(",
    ),
]
