"""Suites: what a run's doubt is worth for rejection, on unknown and corrupted inputs, and against people's answers.

A suite is one entry of `SUITES`; everything else reads the entry.
"""

from bsam.experiments.suites.of_ensembles import evaluate_ensemble_suites, record_ensemble_suites
from bsam.experiments.suites.of_runs import check_run, check_suites, evaluate_suites
from bsam.experiments.suites.registry import SUITES, Suite, choose

__all__ = [
    "SUITES",
    "Suite",
    "check_run",
    "check_suites",
    "choose",
    "evaluate_ensemble_suites",
    "evaluate_suites",
    "record_ensemble_suites",
]
