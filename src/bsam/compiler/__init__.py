"""From functions of tensors to kernels: traced, made smaller, compiled, captured. Kernels of ours register here."""
