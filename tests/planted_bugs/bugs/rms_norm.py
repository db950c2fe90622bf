from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "the mask lets one column too many in",
        "row_is_in, column_is_in = row < n_rows, column < n_columns",
        "row_is_in, column_is_in = row < n_rows, column <= n_columns",
    ),
    Bug(
        "rows are found by their length instead of their stride",
        "x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], is_in, 0.0)"
        ".to(tl.float32)\n    if residual_ptr",
        "x = tl.load(x_ptr + row[:, None] * n_columns + column[None, :], is_in, 0.0)"
        ".to(tl.float32)\n    if residual_ptr",
    ),
    Bug(
        "squares are summed in half precision",
        "rstd = tl.rsqrt(tl.sum(x * x, 1) / n_columns + eps)",
        "rstd = tl.rsqrt(tl.sum((x * x).to(out_ptr.dtype.element_ty), 1) / n_columns + eps)",
    ),
    Bug("the last tile of rows is left out", "tl.cdiv(n_rows, ROWS), tl.num_programs(0)",
        "n_rows // ROWS, tl.num_programs(0)"),
    Bug(
        "the gradient along the residual is forgotten in wide rows",
        "at = grad_sum_ptr + row * grad_sum_stride + column",
        "at = grad_ptr + row * grad_stride + column",
    ),
]  # fmt: skip
