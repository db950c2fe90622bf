"""Benchmarks: how fast, against whom. They use the public API only."""
