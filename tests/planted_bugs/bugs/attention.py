from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "keys that are not there take part",
        'scores = tl.where(is_in[None, :], scores, float("-inf"))\n'
        "            scores = _only_seen(scores, row[:, None]",
        "scores = _only_seen(scores, row[:, None]",
    ),
    Bug(
        "a causal query misses the key of its own place",
        "scores = tl.where(column - row <= upper,",
        "scores = tl.where(column - row < upper,",
    ),
    Bug(
        "tiles on the diagonal count as whole",
        "whole = tl.minimum(tl.maximum(first + upper + 1, 0), n_keys)",
        "whole = tl.minimum(tl.maximum(first + upper + COLUMNS, 0), n_keys)",
    ),
    Bug(
        "what was summed is not scaled down when a larger score turns up",
        "sums = sums * shrink[:, None]",
        "sums = sums * 1.0",
    ),
    Bug(
        "a query that sees nothing divides by zero",
        "total = tl.where(nothing, 1.0, total)",
        "total = tl.where(nothing, 0.0, total)",
    ),
    Bug(
        "heads share keys in the wrong order",
        "head = key_head_index * group + member",
        "head = key_head_index + member * key_heads",
    ),
    Bug(
        "the first queries that see a tile of keys are left out",
        "begin = tl.maximum(first - upper, 0) // ROWS * ROWS",
        "begin = tl.cdiv(tl.maximum(first - upper, 0), ROWS) * ROWS",
    ),
    Bug(
        "the gradient of the keys is not scaled",
        "tl.store(at, (grad_key * scale).to(",
        "tl.store(at, (grad_key * 1.0).to(",
    ),
    Bug(
        "softcap is left out of the gradient of the queries",
        "grad_scores = weights * (grad_weights - delta[:, None]) * slope",
        "grad_scores = weights * (grad_weights - delta[:, None])",
    ),
    Bug(
        "tiles are found in 32 bits",
        "first = tl.cast(start, tl.int64)",
        "first = tl.cast(start, tl.int32)",
    ),
    Bug(
        "numbers within a tile are found in 32 bits",
        "row, column = row.to(tl.int64), column.to(tl.int64)",
        "row, column = row.to(tl.int32), column.to(tl.int32)",
    ),
    Bug(
        "incoming gradients are read as if they lay as the result does",
        "grad_ptr += batch * grad_batch + head * grad_head + far * grad_row",
        "grad_ptr += batch * out_batch + head * out_head + far * out_row",
    ),
]
