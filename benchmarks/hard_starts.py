"""Few data and networks that learn nothing at first: deep ones without normalisation, and tiny ones.

`mnist_100` of `new_data.py` had shown that bSAM may stay at chance there. The problems of `CHOOSING` decided how large
its `damping` is with few data; those of `JUDGED` were written at the same time, and run once, when it was fixed.

| problem | data | network |
|---|---|---|
| `moons_100` | two moons with noise, 100 | perceptron, 24, 12 and 12 units |
| `digits_conv_120` | digits, 120 | convolutions without normalisation |
| `digits_deep_120` | digits, 120 | perceptron with five hidden layers |
| `fashion_deep_150` | FashionMNIST, 150 | four convolutions without normalisation |
| `concrete_deep_150` | 8 features, regression, 150 | perceptron with four hidden layers |
| `passages_300` | topic of a passage, 300, from the words in order | LSTM |
| `circles_100` | two circles with noise, 100 | perceptron, 24, 12 and 12 units |
| `mnist_deep_120` | MNIST, 120 | perceptron with five hidden layers |
| `mnist_conv_200` | MNIST, 200 | four convolutions without normalisation |
| `energy_deep_150` | 8 features, regression, 150 | perceptron with four hidden layers |
| `protein_deep_200` | 9 features, 3 classes, 200 | perceptron with four hidden layers |
| `code_300` | which module 24 tokens of code are from, 300, from the tokens in order | GRU |

The last six are judged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.many_data import images
from benchmarks.new_data import gated, load_code
from benchmarks.small_problems import (
    Data,
    Problem,
    classes,
    convolutions,
    cut,
    digits,
    fashion,
    load_passages,
    no_norm,
    perceptron,
    recurrent,
    regression,
    standardised,
    uci_table,
)

__all__ = ["CHOOSING", "JUDGED"]


def two_classes(make: Callable[..., tuple[Any, Any]], **options: Any) -> Callable[[Path], Data]:
    """2,200 points of two classes in the plane, by scikit-learn; 100 to train on."""

    def load(folder: Path) -> Data:
        x, y = make(2200, random_state=0, **options)
        data = cut(torch.tensor(x, dtype=torch.float32), torch.tensor(y), 100, 100, 2000, seed=50)
        return classes(standardised(data), 2)

    return load


def load_moons(folder: Path) -> Data:
    """Two half-circles, one inside the other's opening."""
    from sklearn.datasets import make_moons

    return two_classes(make_moons, noise=0.2)(folder)


def load_circles(folder: Path) -> Data:
    """A circle around another."""
    from sklearn.datasets import make_circles

    return two_classes(make_circles, noise=0.15, factor=0.5)(folder)


def load_concrete(folder: Path) -> Data:
    """150 of 1,005 mixtures of concrete and their strength."""
    return regression(cut(*uci_table(folder, "concrete"), 150, 100, seed=51))


def load_energy(folder: Path) -> Data:
    """150 of 768 buildings and the energy that heats them."""
    return regression(cut(*uci_table(folder, "energy"), 150, 100, seed=52))


def load_protein(folder: Path) -> Data:
    """200 proteins, and the third into which the error of their structure falls."""
    x, errors = uci_table(folder, "protein-tertiary-structure")
    errors = errors.contiguous()
    thirds = torch.bucketize(errors, errors.quantile(torch.tensor([1 / 3, 2 / 3])))
    return classes(standardised(cut(x, thirds, 200, 200, 2000, seed=53)), 3)


def fewer(data: Data, num_train: int) -> Data:
    """The first training examples alone."""
    x, y = data.train
    return replace(data, train=(x[:num_train], y[:num_train]))


deep = perceptron(64, 64, 64, 64, 64)
plain_convolutions = convolutions(no_norm, 8, 16, 16, 16)
CHOOSING: dict[str, Problem] = {
    "moons_100": Problem(load_moons, perceptron(24, 12, 12), epochs=100, batch_size=20),
    "digits_conv_120": Problem(digits(120, seed=54), convolutions(no_norm, 8, 16), epochs=80, batch_size=20),
    "digits_deep_120": Problem(digits(120, seed=55), deep, epochs=80, batch_size=20),
    "fashion_deep_150": Problem(
        fashion(150, seed=56), plain_convolutions, epochs=60, batch_size=20, needs="FashionMNIST"
    ),
    "concrete_deep_150": Problem(
        load_concrete, perceptron(64, 64, 64, 64), epochs=60, batch_size=16, needs="uci/concrete"
    ),
    "passages_300": Problem(lambda folder: fewer(load_passages(57), 300), recurrent, 25, 20),
}
JUDGED: dict[str, Problem] = {
    "circles_100": Problem(load_circles, perceptron(24, 12, 12), epochs=100, batch_size=20),
    "mnist_deep_120": Problem(images("mnist", 120, seed=58), deep, epochs=80, batch_size=20, needs="MNIST"),
    "mnist_conv_200": Problem(
        images("mnist", 200, seed=59), plain_convolutions, epochs=50, batch_size=20, needs="MNIST"
    ),
    "energy_deep_150": Problem(load_energy, perceptron(64, 64, 64, 64), epochs=60, batch_size=16, needs="uci/energy"),
    "protein_deep_200": Problem(
        load_protein, perceptron(64, 64, 64, 64), epochs=60, batch_size=16, needs="uci/protein-tertiary-structure"
    ),
    "code_300": Problem(
        lambda folder: fewer(functools.partial(load_code, seed=60)(folder), 300), gated, epochs=25, batch_size=20
    ),
}
