"""Turns functions of tensors into kernels: traces, simplifies, compiles, captures. Our kernels register here."""
