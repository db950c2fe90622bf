from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "the mask leaves the last column out",
        "(row < n_rows) & (column < n_columns)",
        "(row < n_rows) & (column < n_columns - 1)",
    ),
    Bug(
        "the stride of the gate is used for the other tensor too",
        "up = tl.load(up_ptr + row * up_stride + column, is_in, 0.0).to(tl.float32)\n    out",
        "up = tl.load(up_ptr + row * gate_stride + column, is_in, 0.0).to(tl.float32)\n    out",
    ),
    Bug("the halves of a packed tensor are swapped", "return rows[:, :half], rows[:, half:]",
        "return rows[:, half:], rows[:, :half]"),
    Bug(
        "the product is rounded twice",
        "out = activated(gate, ACTIVATION) * up",
        "out = activated(gate, ACTIVATION).to(tl.float16).to(tl.float32) * up",
    ),
    Bug("tiles beyond the first of a row are counted along the rows",
        "(tile % across).to(tl.int64) * BLOCK",
        "(tile // across).to(tl.int64) * BLOCK"),
    Bug(
        "the gradient of the gate leaves the other tensor out",
        "grad_gate = grad * up * activation_slope(gate, ACTIVATION)",
        "grad_gate = grad * activation_slope(gate, ACTIVATION)",
    ),
    Bug(
        "rows with gaps between them are read as one row",
        "if all(one.is_contiguous() for one in tensors):",
        "if tensors[0].is_contiguous():",
    ),
]  # fmt: skip
