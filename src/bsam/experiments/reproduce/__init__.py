"""Reproduction of the paper: plans of many runs, worker processes, sweeps, ablations and tuning."""
