"""Number formats by the code the kernels know them by. Knows no numba, so it may be imported anywhere."""

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
"""Activations, norms, biases and the cache have the first two; weights any."""
