"""Regression on UCI's sets: many small networks that are trained as one."""
