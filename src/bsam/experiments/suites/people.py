"""The answers of people to CIFAR-10's test images: CIFAR-10H (Peterson et al., 2019, ICCV).

About 51 people answered for each of the 10,000 images. Their answers are the file `cifar10h-counts.npy` of the data
folder: 10,000 x 10 counts, in the order of the test images. It is published as `cifar10h-counts.npy` in
github.com/jcpeterson/cifar-10h, under CC BY-NC-SA 4.0, and is not downloaded by this package.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bsam.experiments.data import Dataset
from bsam.experiments.data.download import data_folder

__all__ = ["FILE", "read_answers"]

FILE = "cifar10h-counts.npy"
_AGREEMENT = 0.9
"""The least share of images of which most people name the label; in CIFAR-10H it is 99%."""


def read_answers(known: Dataset, folder: Path | None) -> Tensor:
    """Return the shares of the answers, float64 (n, K)."""
    path = data_folder(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: people's answers to the test images, 10,000 x 10 counts. Copy the file of that name "
            "from github.com/jcpeterson/cifar-10h into the data folder, or leave out the suite."
        )
    try:
        counts = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):  # NumPy's own sentence advises to load the file unsafely
        counts = None
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "iuf":
        raise ValueError(f"{path} is not an array of numbers: it is damaged, or another file. Copy it again.")
    labels = known.test[1].cpu().numpy()
    shape = (len(labels), known.num_classes)
    if counts.shape != shape:
        raise ValueError(f"{path} must have counts of the shape {shape}, got {counts.shape}. Copy it again.")
    total = counts.sum(axis=1)
    wrong = (~((counts >= 0).all(axis=1) & (total > 0) & np.isfinite(total))).nonzero()[0]
    if len(wrong):
        raise ValueError(
            f"{path} must have counts >= 0 with an answer in each row, got {counts[wrong[0]].tolist()} in row "
            f"{wrong[0]}. Copy it again."
        )
    agreement = float((counts.argmax(axis=1) == labels).mean())
    if agreement < _AGREEMENT:
        raise ValueError(
            f"{path} names the label of {agreement:.0%} of the test images only: its rows have another order. Copy it "
            "again."
        )
    answers = torch.from_numpy(counts.astype(np.float64))
    return answers / answers.sum(dim=1, keepdim=True)
