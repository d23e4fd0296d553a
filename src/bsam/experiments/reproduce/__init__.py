"""Reproduction of the paper: plans of many runs, workers that survive a crash, sweeps and ablations."""
