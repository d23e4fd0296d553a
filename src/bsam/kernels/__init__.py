"""Layers with one set of weights per group of examples, which vmap over the weights needs.

Each layer registers itself with the compiler when it is imported.
"""

from bsam.kernels import convolution, filter_response, normalise_batch  # noqa: F401
