"""Further small problems: few data, or networks whose weights are small against the noise of few data.

`CHOOSING` decided bSAM's `max_noise`, after `digits_100` of `small_problems.py` had shown that a limit is needed. The
problems of `JUDGED` were run once, when it was fixed.

| problem | data | network |
|---|---|---|
| `digits_150` | digits, 150 | multilayer perceptron |
| `deep_300` | digits, 300 | perceptron with four hidden layers |
| `wide_600` | digits, 600 | perceptron, two hidden layers of 1,024 |
| `vit_150` | digits, 150 | vision transformer |
| `fashion_100` | FashionMNIST, 100 | convolutions without normalisation |
| `lenet_100` | FashionMNIST, 100 | LeNet |
| `wine_90` | 13 features, 3 classes, 90 | multilayer perceptron |
| `concrete_100` | 8 features, regression, 100 | multilayer perceptron |
| `iris_60` | 4 features, 3 classes, 60 | multilayer perceptron |
| `yacht_100` | 6 features, regression, 100 | multilayer perceptron |
| `words_150` | topic of a passage, 150, from the counts of its words | multilayer perceptron |
| `fashion_200` | FashionMNIST, 200 | convolutions with GroupNorm |

The last four are judged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.small_problems import (
    VOCABULARY,
    Data,
    Problem,
    classes,
    convolutions,
    cut,
    digits,
    fashion,
    group_norm,
    lenet,
    load_passages,
    no_norm,
    perceptron,
    regression,
    standardised,
    uci_table,
    vision_transformer,
)

__all__ = ["CHOOSING", "JUDGED"]


def load_wine(folder: Path) -> Data:
    """178 wines of three growers, 13 features."""
    from sklearn import datasets

    x, y = datasets.load_wine(return_X_y=True)
    return classes(standardised(cut(torch.tensor(x, dtype=torch.float32), torch.tensor(y), 90, 30, seed=6)), 3)


def load_iris(folder: Path) -> Data:
    """150 flowers of three species, 4 features."""
    from sklearn import datasets

    x, y = datasets.load_iris(return_X_y=True)
    return classes(standardised(cut(torch.tensor(x, dtype=torch.float32), torch.tensor(y), 60, 30, seed=26)), 3)


def load_concrete(folder: Path) -> Data:
    """100 of 1,005 mixtures of concrete and their strength."""
    return regression(cut(*uci_table(folder, "concrete"), 100, 100, seed=13))


def load_yacht(folder: Path) -> Data:
    """100 of 308 shapes of yachts and their resistance."""
    return regression(cut(*uci_table(folder, "yacht"), 100, 60, seed=27))


def load_words(folder: Path) -> Data:
    """150 passages as the square roots of how often each word is in them."""
    data = load_passages(seed=29)
    train, validation, test = (
        (F.one_hot(x, VOCABULARY).sum(dim=1).float().sqrt(), y) for x, y in (data.train, data.validation, data.test)
    )
    return replace(data, train=(train[0][:150], train[1][:150]), validation=validation, test=test)


CHOOSING: dict[str, Problem] = {
    "digits_150": Problem(digits(150, seed=19), perceptron(128, 128), epochs=100, batch_size=25),
    "deep_300": Problem(digits(300, seed=22), perceptron(128, 128, 128, 128), epochs=40, batch_size=25),
    "wide_600": Problem(digits(600, seed=21), perceptron(1024, 1024), epochs=10, batch_size=50),
    "vit_150": Problem(digits(150, seed=24), vision_transformer, epochs=40, batch_size=25),
    "fashion_100": Problem(
        fashion(100, seed=20), convolutions(no_norm, 8, 16, 16), epochs=100, batch_size=20, needs="FashionMNIST"
    ),
    "lenet_100": Problem(fashion(100, seed=23), lenet, epochs=60, batch_size=20, needs="FashionMNIST"),
    "wine_90": Problem(load_wine, perceptron(64, 64), epochs=60, batch_size=16),
    "concrete_100": Problem(load_concrete, perceptron(64, 64), epochs=60, batch_size=16, needs="uci/concrete"),
}
JUDGED: dict[str, Problem] = {
    "iris_60": Problem(load_iris, perceptron(64, 64), epochs=60, batch_size=16),
    "yacht_100": Problem(load_yacht, perceptron(64, 64), epochs=60, batch_size=16, needs="uci/yacht"),
    "words_150": Problem(load_words, perceptron(64), epochs=40, batch_size=16),
    "fashion_200": Problem(
        fashion(200, seed=28), convolutions(group_norm, 8, 16, 16), epochs=60, batch_size=20, needs="FashionMNIST"
    ),
}
