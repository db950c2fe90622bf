from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug("the last column is left out", "(column < n_columns)", "(column < n_columns - 1)"),
    Bug("the strides of a row and a column are swapped",
        "row * strides[index][1] + column * strides[index][2]",
        "row * strides[index][2] + column * strides[index][1]"),
    Bug("matrices beyond the first are forgotten", "at = matrix * strides[index][0] + row",
        "at = row"),
    Bug("relu takes NaN away", "y = tl.where(a <= 0.0, 0.0, a)", "y = tl.where(a > 0.0, a, 0.0)"),
    Bug("maximum takes NaN away",
        "y = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)", "y = tl.where(a > b, a, b)"),
    Bug("equal numbers each get the whole gradient", "tl.where(b == c, 0.5 * a, a)", "a"),
    Bug("values are rounded on the way",
        "value = _computed(values, CHAIN, step, ROWS, BLOCK)",
        "value = _computed(values, CHAIN, step, ROWS, BLOCK).to("
        "outs[0].dtype.element_ty).to(tl.float32)"),
    Bug("dimensions are folded by the strides of the first tensor alone",
        "mine[-1] == one[dim] * size for mine, one in zip(folded, strides, strict=True)",
        "mine[-1] == one[dim] * size for mine, one in zip(folded[:1], strides[:1], strict=True)"),
    Bug("gradients of what was broadcast are rounded before they are summed",
        "len(grads) + number if tensors[number].shape == full else -1 for",
        "len(grads) + number for"),
]  # fmt: skip
