"""Layers with one set of weights per group of examples, for vmap over the weights.

Each registers itself with the compiler when it is imported.
"""

from bsam.kernels import convolution, filter_response, normalise_batch  # noqa: F401
