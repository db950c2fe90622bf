"""A run as text, as a page and as plots."""
