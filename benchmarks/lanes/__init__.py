"""Comparisons that only make sense in one lane: a torch of its own and what exists for it alone."""
