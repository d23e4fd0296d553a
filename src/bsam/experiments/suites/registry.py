"""The registry of suites: one entry per suite. No other file has a list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import bsam
from bsam.experiments.choices import ALL_SUITES
from bsam.experiments.corruptions import KINDS, STRENGTHS, check_images, corrupt
from bsam.experiments.data import DATASETS, Dataset
from bsam.experiments.suites.people import read_answers
from bsam.experiments.suites.ratings import rate_corruptions, rate_people, rate_rejections, rate_unknowns
from bsam.experiments.suites.show import corruptions_table, people_table, rejection_table, unknown_table
from bsam.experiments.suites.unknown_inputs import UNKNOWN, unknown_images

__all__ = ["SUITES", "Suite", "choose"]


@dataclass(frozen=True)
class Suite:
    """Everything that the experiments need to know about a suite."""

    title: str
    rate: Callable[[bsam.Predictions, Mapping[str, bsam.Predictions], Any], dict[str, Any]]
    """Rates predictions of the test set and of the suite's own sets; the last argument is what `about` returns."""
    table: Callable[[dict[str, Any]], tuple[list[str], list[list[str]]]]
    """Returns the heads and the rows of a table of its numbers."""
    misfit: Callable[[str], str | None] = lambda dataset: None
    """Returns why it does not fit a data set, or None."""
    images: Callable[[Dataset, Path | None], dict[str, Tensor]] = lambda known, folder: {}
    """Returns its own sets, raw images by name; none if the test set is enough."""
    keeps_labels: bool = False
    """Whether its sets have the labels of the test set."""
    about: Callable[[Dataset, Path | None], Any] = lambda known, folder: None
    """Returns what `rate` needs to know beside predictions."""
    most_samples: int | None = None
    """The largest number of samples, unless more are asked for."""

    def counts(self, samples: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of samples that it takes for a run that is evaluated with `samples`."""
        most = self.most_samples
        return tuple(sorted({count if most is None else min(count, most) for count in samples}))


def _no_unknown(dataset: str) -> str | None:
    return None if dataset in UNKNOWN else f"there are unknown inputs for {', '.join(UNKNOWN)} only"


def _no_corruption(dataset: str) -> str | None:
    return check_images(DATASETS[dataset].image_shape)


def _no_people(dataset: str) -> str | None:
    return None if dataset == "cifar10" else "people answered for cifar10 only"


def _all_unknown(known: Dataset, folder: Path | None) -> dict[str, Tensor]:
    return {name: unknown_images(known, name, folder) for name in UNKNOWN[known.info.name]}


def _all_corrupted(known: Dataset, folder: Path | None) -> dict[str, Tensor]:
    return {f"{kind}-{strength}": corrupt(known.test[0], kind, strength) for kind in KINDS for strength in STRENGTHS}


SUITES: dict[str, Suite] = {
    "rejection": Suite("rejection of doubtful predictions", rate_rejections, rejection_table),
    "unknown": Suite(
        "unknown inputs",
        rate_unknowns,
        unknown_table,
        misfit=_no_unknown,
        images=_all_unknown,
        about=lambda known, folder: UNKNOWN[known.info.name],
    ),
    "corruptions": Suite(
        "corrupted images",
        rate_corruptions,
        corruptions_table,
        misfit=_no_corruption,
        images=_all_corrupted,
        keeps_labels=True,
        most_samples=8,  # for 750,000 images
    ),
    "human": Suite("people's answers", rate_people, people_table, misfit=_no_people, about=read_answers),
}
"""By name in commands and records: those of `SUITE_NAMES`."""


def choose(names: Iterable[str], dataset: str) -> tuple[str, ...]:
    """Return the suites that are asked for, in the order of `SUITES`; `shift` stands for all that fit the data set."""
    asked = set(names)
    unknown = sorted(asked - {ALL_SUITES, *SUITES})
    if unknown:
        raise ValueError(f"there is no suite {unknown[0]!r}: choose from {', '.join(SUITES)}, or {ALL_SUITES} for all.")
    fitting = [name for name, suite in SUITES.items() if suite.misfit(dataset) is None]
    for name in sorted(asked - {ALL_SUITES}):
        if reason := SUITES[name].misfit(dataset):
            raise ValueError(
                f"the suite {name} does not fit {dataset}: {reason}. These do: {', '.join(fitting)}; {ALL_SUITES} is "
                "all of them."
            )
    return tuple(name for name in fitting if name in asked or ALL_SUITES in asked)
