from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug("the second of a pair turns the wrong way", "second * cos + first * sin, half, n_pairs,",
        "second * cos - first * sin, half, n_pairs,"),
    Bug(
        "the strides of cosines are used for the sines",
        "sin = _of_pairs(sin_ptr, sin_strides, batch, token, half, 0.0, PAIRS)\n    if INVERSE:",
        "sin = _of_pairs(sin_ptr, cos_strides, batch, token, half, 0.0, PAIRS)\n    if INVERSE:",
    ),
    Bug("all of a batch turn by the angles of its first",
        "at = ptr + batch * strides[0] + token * strides[1]",
        "at = ptr + token * strides[1]"),
    Bug(
        "the mask lets one pair too many in",
        "second.to(tl.int64), pair < n_pairs",
        "second.to(tl.int64), pair <= n_pairs",
    ),
    Bug("the mean of squares is one of pairs", "(2 * n_pairs) + eps)", "n_pairs + eps)"),
    Bug("what is not rotated is turned by the last angle", "half, 1.0, PAIRS)\n    sin = _of_pairs("
        "sin_ptr, sin_strides, batch, token, half, 0.0, PAIRS)\n    if INVERSE",
        "half, 0.0, PAIRS)\n    sin = _of_pairs("
        "sin_ptr, sin_strides, batch, token, half, 0.0, PAIRS)\n    if INVERSE"),
    Bug("rows beyond the last head are 0 * inf", "rstd = tl.where(is_in, _rstd(x_first, x_second, "
        "n_pairs, eps), 0.0)[:, None]", "rstd = _rstd(x_first, x_second, n_pairs, eps)[:, None]"),
    Bug("gradients turn on instead of back", "settings = eps, rotated, interleaved, not inverse",
        "settings = eps, rotated, interleaved, inverse"),
]  # fmt: skip
