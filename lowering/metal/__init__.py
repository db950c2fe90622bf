"""Kernels of ours for Apple GPUs: Metal shaders as text, compiled by macOS at their first use.

Each family is two files: `<family>.metal` holds the kernels, `<family>.py` their launcher, their
meaning in plain torch, and their registration as a torch operator. Nothing here needs a compiler of
the user's, and importing it starts no device.
"""
