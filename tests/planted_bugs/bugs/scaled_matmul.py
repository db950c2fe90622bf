from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "scales of rows and columns change places",
        "row_scale=scale_a, column_scale=scale_b",
        "row_scale=scale_b, column_scale=scale_a",
    ),
    Bug(
        "the second part of a long row is read from one number on",
        "more = _scale_of(tl.load(at + start, is_in",
        "more = _scale_of(tl.load(at + 1, is_in",
    ),
    Bug(
        "whole numbers are cut off instead of rounded",
        "        y = rounded(y)\n",
        "        y = y\n",
    ),
    Bug(
        "a row with NaN has the scale of its other numbers",
        'return tl.where(nan, float("nan"), scale)',
        "return scale",
    ),
    Bug(
        "NaN in a later part of a row is lost",
        "(more > scale) | (more != more)",
        "more > scale",
    ),
    Bug(
        "rows are found by their length instead of their stride",
        "at = x_ptr + row[:, None] * x_stride",
        "at = x_ptr + row[:, None] * n_columns",
    ),
    Bug(
        "negative numbers do not count for the scale",
        "scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-10)",
        "scale = tl.maximum(tl.max(x, 1), 1e-10)",
    ),
    Bug(
        "a dtype that the architecture has not reaches the kernel",
        "if not _multiplies(a) or not _multiplies(b):",
        "if not a.is_contiguous and not _multiplies(b):",
    ),
]
