from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "padded columns have a distance from the mean, too",
        "centred = tl.where(is_in, x - mean[:, None], 0.0)",
        "centred = x - mean[:, None]",
    ),
    Bug(
        "the mask lets one column too many in",
        "row_is_in, column_is_in = row < n_rows, column < n_columns",
        "row_is_in, column_is_in = row < n_rows, column <= n_columns",
    ),
    Bug(
        "the variance is a difference of large numbers",
        "rstd = tl.rsqrt(tl.sum(centred * centred, 1) / n_columns + eps)",
        "rstd = tl.rsqrt(tl.sum(x * x, 1) / n_columns - mean * mean + eps)",
    ),
    Bug(
        "parts of a wide row are merged as if they had one mean",
        "tl.sum(centred * centred, 0) + step * (seen / (seen + here)) * step * here",
        "tl.sum(centred * centred, 0)",
    ),
    Bug(
        "rows of gradients are found by the stride of x",
        "at = grad_ptr + row[:, None] * grad_stride + column[None, :]\n"
        "        grad = tl.load(at, is_in, 0.0).to(tl.float32)\n        x = ",
        "at = grad_ptr + row[:, None] * x_stride + column[None, :]\n"
        "        grad = tl.load(at, is_in, 0.0).to(tl.float32)\n        x = ",
    ),
    Bug(
        "the gradient's mean is not taken away",
        "slope[:, None] * (weighted - level[:, None] - normed",
        "slope[:, None] * (weighted - normed",
    ),
    Bug(
        "the last tile of rows is left out",
        "tl.cdiv(n_rows, ROWS), tl.num_programs(0)",
        "n_rows // ROWS, tl.num_programs(0)",
    ),
    Bug(
        "the gradient along the residual is forgotten in wide rows",
        "at = grad_sum_ptr + row * grad_sum_stride + column",
        "at = grad_ptr + row * grad_stride + column",
    ),
]
