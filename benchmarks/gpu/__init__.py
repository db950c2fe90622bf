"""What is run the moment a GPU is there: right or wrong, tuned, and how fast against whom.

`python -m benchmarks.gpu check|tune|kernels|models --json gpu.json`; see README.md in this folder.
"""
