"""Whole models of transformers, tiny and with random weights, through every level."""
