"""Layers with one set of weights for each of several groups of examples: what vmap over the weights asks for.

Each registers itself with the compiler when it is imported.
"""

from bsam.kernels import convolution, filter_response, normalise_batch  # noqa: F401
