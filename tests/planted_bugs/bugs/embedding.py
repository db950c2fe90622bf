from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug("ids are not compared with the size of the table",
        "is_known = (row >= 0) & (row < n_rows)", "is_known = (row >= 0) & (row <= n_rows)"),
    Bug(
        "the strides of the table are swapped",
        "row[:, None] * row_stride + column[None, :] * column_stride",
        "row[:, None] * column_stride + column[None, :] * row_stride",
    ),
    Bug("gradients are taken in the order of places", "source[:, None] * grad_stride",
        "at.to(tl.int64)[:, None] * grad_stride"),
    Bug("a part that goes on in the next is taken for a whole run", "if begins & (crosses == 0):",
        "if begins:"),
    Bug("a part ends one place late", "end = tl.minimum((place // PART + 1) * PART, n_ids)",
        "end = tl.minimum((place // PART + 1) * PART + 1, n_ids)"),
    Bug(
        "the first part of a long run is left out",
        "total = tl.load(at, column_is_in, 0.0)",
        "total = tl.zeros([BLOCK], tl.float32)",
    ),
    Bug("the row of padding gets a gradient", "(row < n_rows) & (row != padding)",
        "(row < n_rows)"),
    Bug(
        "gradients are summed in half precision",
        "total += tl.sum(tl.load(at, is_in, 0.0).to(tl.float32), 0)",
        "total = (total + tl.sum(tl.load(at, is_in, 0.0).to(tl.float32), 0))"
        ".to(out_ptr.dtype.element_ty).to(tl.float32)",
    ),
]  # fmt: skip
