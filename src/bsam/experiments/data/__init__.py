"""Data sets: they are read or downloaded, checked, moved to the device, and cut into batches there."""

from bsam.experiments.data.batches import epoch_length, plain_batches, stacked_batches
from bsam.experiments.data.loading import Dataset, load, load_test
from bsam.experiments.data.table import DATASETS, DatasetInfo

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetInfo",
    "epoch_length",
    "load",
    "load_test",
    "plain_batches",
    "stacked_batches",
]
