from tests.planted_bugs.bugs import Bug

BUGS = [
    Bug(
        "one key beyond the length is read",
        "end = tl.minimum(begin + share, length)",
        "end = tl.minimum(begin + share, length + 1)",
    ),
    Bug(
        "a token sees the keys of the next one",
        "last_seen = (length - n_queries + token)",
        "last_seen = (length - n_queries + token + 1)",
    ),
    Bug(
        "a window is one key too narrow",
        "seen &= column[None, :] >= last_seen[:, None] - window",
        "seen &= column[None, :] > last_seen[:, None] - window",
    ),
    Bug(
        "splits without keys count",
        'lse = tl.where(nothing, float("-inf"), top + tl.log2(total))',
        "lse = tl.where(nothing, 0.0, top + tl.log2(total))",
    ),
    Bug(
        "splits are averaged",
        'parts = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))',
        "parts = tl.exp2(lse * 0.0)",
    ),
    Bug(
        "rows of a page are counted from the start of the sequence",
        "within = (column % page_size).to(tl.int64)",
        "within = column.to(tl.int64)",
    ),
    Bug(
        "rows of the tile find the wrong head",
        "head = key_head_index * group + row // n_queries",
        "head = key_head_index * group + row % group",
    ),
    Bug(
        "places in the cache are worked out in 32 bits",
        "key_at = column.to(tl.int64) * key_row",
        "key_at = column * key_row",
    ),
]
