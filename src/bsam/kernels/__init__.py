"""Layers with one set of weights for each of several groups of examples: what vmap over the weights asks for."""
