from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "one class too many is read",
        "column_is_in = column < n_columns\n        is_in",
        "column_is_in = column <= n_columns\n        is_in",
    ),
    Bug(
        "the sum so far is not scaled when a higher logit comes",
        "others = others * tl.exp(highest - shift) + tl.sum(here, 1)",
        "others = others + tl.sum(here, 1)",
    ),
    Bug(
        "rows are found by their length instead of their stride",
        "at = logits_ptr + row[:, None] * logits_stride + column[None, :]\n        x = ",
        "at = logits_ptr + row[:, None] * n_columns + column[None, :]\n        x = ",
    ),
    Bug(
        "the doubt about the true class is taken from 1",
        "tl.store(doubt_ptr + row, others / (others + true), row_is_in)",
        "tl.store(doubt_ptr + row, 1.0 - true / (others + true), row_is_in)",
    ),
    Bug(
        "small losses lose their first digits",
        "tl.where(odds < 0.03, series, log_sum + (shift - true_logit))",
        "log_sum + (shift - true_logit)",
    ),
    Bug(
        "every row takes the first one's incoming gradient",
        "tl.load(grad_ptr + row * grad_stride, counts, 0.0)",
        "tl.load(grad_ptr + row * 0, counts, 0.0)",
    ),
    Bug(
        "rows that do not count have a gradient",
        "result = tl.where(counts[:, None], result, (lse * 0.0)[:, None])",
        "result = tl.where(row_is_in[:, None], result, (lse * 0.0)[:, None])",
    ),
    Bug(
        "the weights are left out of the mean",
        "total / shares.sum()",
        "total / (shares > 0).sum()",
    ),
    Bug(
        "a class beyond the last one is read",
        "is_class = (target >= 0) & (target < n_columns)\n    true_ptr",
        "is_class = (target >= 0) & (target <= n_columns)\n    true_ptr",
    ),
    Bug(
        "a row of minus infinity is shifted by it",
        'shift = tl.where(higher == float("-inf"), 0.0, higher)',
        "shift = higher",
    ),
]
