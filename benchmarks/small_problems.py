"""Eighteen small problems with real data: each a data set, a network, a number of epochs and a batch size.

They are of many kinds on purpose: a setting that is good on all of them is a default. `CHOOSING` names the ten problems
on which defaults may be chosen, `JUDGED` the eight others, which are looked at once, at the end. The two lists were
written before anything was run. `out_of_the_box.py` runs them.

| problem | data | network |
|---|---|---|
| `digits_mlp` | digits, 600 | multilayer perceptron |
| `digits_groupnorm` | digits, 600 | convolutions with GroupNorm |
| `fashion_1000` | FashionMNIST, 1,000 | LeNet |
| `breast_cancer` | 30 features, 2 classes, 250 | multilayer perceptron |
| `diabetes` | 10 features, regression, 220 | multilayer perceptron |
| `text_transformer` | next character of Python's documentation, 60,000 | transformer |
| `text_lora` | topic of a passage, 1,000 | low-rank adapters of a transformer that was trained on the next word |
| `noisy_labels` | digits, 600, of which 20% have a random label | multilayer perceptron |
| `long_run` | digits, 300, 150 epochs | convolutions with BatchNorm |
| `short_run` | concrete, 8 features, regression, 640, 200 steps | multilayer perceptron |
| `digits_batchnorm` | digits, 600 | residual convolutions with BatchNorm |
| `digits_vit` | digits, 600 | vision transformer |
| `digits_100` | digits, 100 | convolutions without normalisation |
| `fashion_10000` | FashionMNIST, 10,000 | LeNet |
| `wine_quality` | 11 features, 3 classes, 700 | multilayer perceptron |
| `kin8nm` | 8 features, regression, 3,000 | multilayer perceptron |
| `text_words` | topic of a passage, 1,000, from the counts of its words | multilayer perceptron |
| `text_lstm` | topic of a passage, 1,000, from its words in order | LSTM |

The last eight are judged. Digits, breast cancer and diabetes come with scikit-learn; the texts are Python's own
documentation (`pydoc_data.topics`, which differs between versions of Python: its hash is in the record);
FashionMNIST and UCI's regression sets (concrete, wine-quality-red, kin8nm, in the layout `uci/NAME/data.txt` of Gal and
Ghahramani's splits) are read from the data folder.

Every problem is cut into training, validation and test examples once and for all. Inputs and real targets are
standardised by the training part. The loss of everyone is the mean negative log-likelihood. That of a regression has
a fixed noise: the error on the validation part of a kernel regression that was fitted to the training part.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bsam
from bsam.experiments.data import load as load_images
from bsam.experiments.data.embedded import Labelled

__all__ = ["CHOOSING", "JUDGED", "PROBLEMS", "Data", "Problem", "average_loss", "missing_data", "outputs", "predict"]


@dataclass(frozen=True, eq=False)
class Data:
    """The examples of a problem and the likelihood of their labels."""

    train: Labelled
    validation: Labelled
    test: Labelled
    num_classes: int = 0
    """0: regression."""
    noise_std: float | None = None
    """Of a regression, in units of the standardised target."""
    shuffled: int = 0
    """How many training and validation labels were drawn anew."""

    @property
    def likelihood(self) -> str:
        """`"categorical"` or `"gaussian"`."""
        return "categorical" if self.num_classes else "gaussian"

    @property
    def num_data(self) -> int:
        """How many labels there are to train on: the N of the loss's sum. A text has one per character."""
        return self.train[1].numel()

    @property
    def chance(self) -> tuple[float, float]:
        """Accuracy (or R^2) and NLL of a prediction that ignores the inputs."""
        if self.num_classes:
            return 1 / self.num_classes, math.log(self.num_classes)
        assert self.noise_std is not None
        residual = float(self.test[1].square().mean())  # the training targets have mean 0
        return 0.0, 0.5 * (residual / self.noise_std**2 + math.log(2 * math.pi * self.noise_std**2))

    @property
    def failure_threshold(self) -> float:
        """An accuracy (or R^2) that is not above it is a failure."""
        if not self.num_classes:
            return 0.02
        counts = torch.bincount(self.test[1].flatten())
        return max(1.5 / self.num_classes, float(counts.max() / counts.sum()))  # always the most frequent class

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of all inputs and labels."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            for tensor in part:
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Problem:
    """A problem: data, network and length of training."""

    load: Callable[[Path], Data]
    """Makes the data, given the data folder."""
    network: Callable[[Data], nn.Module]
    """Makes the network, with initial weights from torch's global generator."""
    epochs: int
    batch_size: int
    needs: str | None = None
    """A file or folder of the data folder."""

    def num_steps(self, data: Data) -> int:
        """How many steps a run has."""
        return self.epochs * -(-len(data.train[0]) // self.batch_size)


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Logits (n, K), or means (n,): one row per label."""
    f = model(x)
    return f.squeeze(-1) if f.shape[-1] == 1 else f.flatten(0, -2)


def average_loss(model: nn.Module, data: Data, x: Tensor, y: Tensor) -> Tensor:
    """The mean negative log-likelihood, but for a constant."""
    f = outputs(model, x)
    if data.num_classes:
        return F.cross_entropy(f, y.flatten())
    return 0.5 * ((y - f) / data.noise_std).square().mean()


def predict(
    model: nn.Module, posterior: bsam.Posterior, data: Data, part: Labelled, *, num_samples: int
) -> dict[str, float]:
    """Accuracy (of a regression R^2), NLL and (of classes) ECE, averaged over samples of the posterior.

    BatchNorm's statistics are estimated again for each sample, on the training inputs.
    """
    batches = [(x, y.flatten()) for x, y in zip(*(tensor.split(500) for tensor in part), strict=True)]
    options: dict[str, Any] = {"num_samples": num_samples, "forward": outputs, "progress": False}
    if num_samples and any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        options["recalibrate"] = list(data.train[0].split(500))  # two tensors in a tuple are inputs and labels
    if data.num_classes:
        found = bsam.metrics.summary(bsam.predict(model, posterior, batches, **options), num_bootstrap=0)
        return {"accuracy": found.accuracy, "nll": found.nll, "ece": found.ece}
    answer = bsam.predict(model, posterior, batches, likelihood="gaussian", noise_std=data.noise_std, **options)
    y = part[1]
    r_squared = 1 - (answer.mean - y).square().mean() / (y - y.mean()).square().mean()
    return {"accuracy": float(r_squared), "nll": float(-answer.log_density.mean())}


def missing_data(name: str, folder: Path) -> str | None:
    """What the data folder lacks for a problem, or None."""
    needs = PROBLEMS[name].needs
    return f"{folder / needs} is not there" if needs and not (folder / needs).exists() else None


# Data


def cut(x: Tensor, y: Tensor, num_train: int, num_validation: int, num_test: int | None = None, *, seed: int) -> Data:
    """Parts of the examples, without overlap; all that are left are test examples, or `num_test` of them."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    ends = [num_train, num_train + num_validation]
    stop = len(x) if num_test is None else ends[1] + num_test
    parts = order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] : stop]
    return Data(*((x[i], y[i]) for i in parts))


def standardised(data: Data) -> Data:
    """Each feature with mean 0 and variance 1 over the training examples."""
    mean, std = data.train[0].mean(dim=0), data.train[0].std(dim=0).clamp_min(1e-6)
    parts = {name: ((x - mean) / std, y) for name in ("train", "validation", "test") for x, y in [getattr(data, name)]}
    return replace(data, **parts)


def classes(data: Data, num_classes: int) -> Data:
    """The same examples, with so many classes."""
    return replace(data, num_classes=num_classes)


def regression(data: Data) -> Data:
    """Standardised inputs and targets, and a noise."""
    from sklearn.kernel_ridge import KernelRidge

    data = standardised(data)
    mean, std = data.train[1].mean(), data.train[1].std()
    train, validation, test = ((x, (y - mean) / std) for x, y in (data.train, data.validation, data.test))
    errors = []
    for alpha in (0.01, 0.1, 1.0, 10.0):
        kernel = KernelRidge(kernel="rbf", gamma=0.5 / train[0].shape[1], alpha=alpha)
        kernel.fit(*(tensor.double().numpy() for tensor in train))
        answer = torch.from_numpy(kernel.predict(validation[0].double().numpy()))
        errors.append(float((answer - validation[1]).square().mean().sqrt()))
    return replace(data, train=train, validation=validation, test=test, noise_std=round(min(errors), 3))


def digits(num_train: int, *, seed: int, noisy: float = 0.0) -> Callable[[Path], Data]:
    """Handwritten digits, (1, 8, 8)."""

    def load(folder: Path) -> Data:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x = torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None]
        data = classes(cut(x, torch.tensor(bunch.target), num_train, 297, 800, seed=seed), 10)
        return with_noisy_labels(data, noisy, seed=seed) if noisy else data

    return load


def with_noisy_labels(data: Data, share: float, *, seed: int) -> Data:
    """A share of the training and validation labels is drawn at random; test labels stay."""
    generator = torch.Generator().manual_seed(seed)
    changed, parts = 0, []
    for x, y in (data.train, data.validation):
        chosen = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
        y = y.clone()
        y[chosen] = torch.randint(data.num_classes, (len(chosen),), generator=generator)
        changed += len(chosen)
        parts.append((x, y))
    return replace(data, train=parts[0], validation=parts[1], shuffled=changed)


def fashion(num_train: int, *, seed: int) -> Callable[[Path], Data]:
    """FashionMNIST with pixels averaged in squares of four, (1, 14, 14): a quarter of the time."""

    def load(folder: Path) -> Data:
        images = load_images("fashionmnist", folder, download=False)
        order = torch.randperm(len(images.train[0]), generator=torch.Generator().manual_seed(seed))
        parts = order[:num_train], order[num_train : num_train + 1000]

        def shrunk(x: Tensor) -> Tensor:
            return F.avg_pool2d(images.normalise(x), 2)

        train, validation = ((shrunk(images.train[0][i]), images.train[1][i]) for i in parts)
        return Data(train, validation, (shrunk(images.test[0][:2000]), images.test[1][:2000]), num_classes=10)

    return load


def load_breast_cancer(folder: Path) -> Data:
    """569 tumours, 30 features, benign or malignant."""
    from sklearn import datasets

    x, y = datasets.load_breast_cancer(return_X_y=True)
    data = cut(torch.tensor(x, dtype=torch.float32), torch.tensor(y), 250, 100, seed=1)
    return classes(standardised(data), 2)


def load_diabetes(folder: Path) -> Data:
    """442 patients, 10 features, the disease's progression after a year."""
    from sklearn import datasets

    x, y = datasets.load_diabetes(return_X_y=True)
    return regression(cut(*(torch.tensor(a, dtype=torch.float32) for a in (x, y)), 220, 80, seed=2))


def uci_table(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Features and the target, which is the last column; of equal rows one."""
    rows = np.unique(np.loadtxt(folder / "uci" / name / "data.txt"), axis=0)
    table = torch.tensor(rows, dtype=torch.float32)
    return table[:, :-1], table[:, -1]


def load_concrete(folder: Path) -> Data:
    """1,005 mixtures of concrete and their strength."""
    return regression(cut(*uci_table(folder, "concrete"), 640, 150, seed=3))


def load_kin8nm(folder: Path) -> Data:
    """8,192 poses of a robot's arm and the distance of its hand."""
    return regression(cut(*uci_table(folder, "kin8nm"), 3000, 1000, 2000, seed=4))


def load_wine_quality(folder: Path) -> Data:
    """1,359 red wines, 11 features, rated up to 5, 6, or better."""
    x, quality = uci_table(folder, "wine-quality-red")
    return classes(standardised(cut(x, (quality - 5).clamp(0, 2).long(), 700, 200, seed=5)), 3)


TOPICS = (
    "specialnames",
    "compound",
    "types",
    "formatstrings",
    "string-methods",
    "typesseq",
    "debugger",
    "typesmapping",
)
"""Of Python's documentation: the largest ones that differ in most of their paragraphs."""
PASSAGE, VOCABULARY, CONTEXT = 24, 1000, 32
"""Words of a passage; different words; characters that the language model sees."""
ADAPTED = 8
"""Seed of the passages on which the adapters are trained."""


def paragraphs(topic: str) -> list[str]:
    """The paragraphs of a topic, without line breaks."""
    from pydoc_data.topics import topics

    return [" ".join(part.split()) for part in topics[topic].split("\n\n")]


def cut_words(text: list[str]) -> list[list[str]]:
    """Passages of 24 words, one after the other."""
    without_lines = re.sub(r"[-+=|*]{3,}", " ", " ".join(text))  # those that tables are drawn with
    words = re.findall(r"[a-z_]+|[^\w\s|]", without_lines.lower())
    return [words[i : i + PASSAGE] for i in range(0, len(words) - PASSAGE + 1, PASSAGE)]


@functools.cache
def passages() -> tuple[list[list[str]], list[int]]:
    """The words of passages and the topic of each. What two topics share belongs to none, and no text comes twice."""
    owners = Counter(part for name in TOPICS for part in set(paragraphs(name)))
    texts: dict[tuple[str, ...], tuple[list[str], int]] = {}
    for label, name in enumerate(TOPICS):
        for text in cut_words([part for part in paragraphs(name) if owners[part] == 1])[:250]:
            texts.setdefault(tuple(sorted(text)), (text, label))  # in any order, because one problem only counts
    return [text for text, _ in texts.values()], [label for _, label in texts.values()]


def other_passages() -> list[list[str]]:
    """Passages of the topics that are not to be told apart, without what they share with those that are."""
    from pydoc_data.topics import topics

    known = {part for name in TOPICS for part in paragraphs(name)}
    rest = dict.fromkeys(part for name in sorted(topics) if name not in TOPICS for part in paragraphs(name))
    return cut_words([part for part in rest if part not in known])


def word_numbers(texts: list[list[str]], vocabulary_of: list[list[str]]) -> Tensor:
    """Each word's rank of frequency among the texts of the vocabulary; rare words share the last number."""
    common = Counter(word for text in vocabulary_of for word in text).most_common(VOCABULARY - 1)
    ranks = {word: rank for rank, (word, _) in enumerate(common)}
    return torch.tensor([[ranks.get(word, VOCABULARY - 1) for word in text] for text in texts])


def cut_passages(seed: int) -> Data:
    """The numbers of passages, and their topics."""
    texts, labels = passages()
    return cut(torch.arange(len(texts)), torch.tensor(labels), 1000, 300, seed=seed)


def load_passages(seed: int) -> Data:
    """Passages as numbers of words in order, (24,), and their topic."""
    texts, _ = passages()
    data = cut_passages(seed)
    known = [texts[i] for i in data.train[0]]  # the words that a training text has
    parts = ((word_numbers([texts[i] for i in x], known), y) for x, y in (data.train, data.validation, data.test))
    return Data(*parts, num_classes=len(TOPICS))


def load_word_counts(folder: Path) -> Data:
    """Passages as the square roots of how often each word is in them."""
    data = load_passages(seed=6)

    def counts(part: Labelled) -> Labelled:
        x, y = part
        return F.one_hot(x, VOCABULARY).sum(dim=1).float().sqrt(), y

    return replace(data, train=counts(data.train), validation=counts(data.validation), test=counts(data.test))


def load_word_order(folder: Path) -> Data:
    """Passages as numbers of words in order, for the LSTM."""
    return load_passages(seed=7)


def load_adapted(folder: Path) -> Data:
    """Passages as numbers of words in order, for the adapters."""
    return load_passages(seed=ADAPTED)


def load_characters(folder: Path) -> Data:
    """Windows of 32 characters, and the next character after each of them, (32,)."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()).lower() for name in ("specialnames", "formatstrings", "debugger"))
    alphabet = [character for character, count in Counter(text).items() if count >= 20]
    numbers = {character: i for i, character in enumerate(sorted(alphabet))}
    code = torch.tensor([numbers[character] for character in text if character in numbers])
    length = (len(code) - 1) // CONTEXT * CONTEXT
    windows = torch.cat([code[:length].view(-1, CONTEXT), code[CONTEXT : length + 1 : CONTEXT, None]], dim=1)
    windows = windows.unique(dim=0)  # some sentences come twice
    x, y = windows[:, :-1], windows[:, 1:]
    return classes(cut(x, y, 1875, 300, 300, seed=9), len(numbers))


# Networks


def perceptron(*hidden: int) -> Callable[[Data], nn.Module]:
    """Linear layers with ReLU."""

    def make(data: Data) -> nn.Module:
        sizes = (data.train[0][0].numel(), *hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, units in pairwise(sizes):
            layers += [nn.Linear(inputs, units), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], data.num_classes or 1))

    return make


def convolutions(norm: Callable[[int], nn.Module], *channels: int) -> Callable[[Data], nn.Module]:
    """Convolutions of 3 x 3, each normalised, the second followed by pooling; averages over quarters at the end."""

    def make(data: Data) -> nn.Module:
        layers: list[nn.Module] = []
        for k, (inputs, units) in enumerate(pairwise((1, *channels))):
            layers += [nn.Conv2d(inputs, units, 3, padding=1), norm(units), nn.ReLU()]
            if k == 1:
                layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels[-1], data.num_classes)]
        return nn.Sequential(*layers)

    return make


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def residual_network(data: Data) -> nn.Module:
    """A stem of stride 2, two residual blocks, and the average over the image."""
    stem = [nn.Conv2d(1, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, data.num_classes)]
    return nn.Sequential(*stem, Residual(24), Residual(24), *head)


def lenet(data: Data) -> nn.Module:
    """LeNet with ReLU for images of 14 x 14."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(144, 84),
        nn.ReLU(),
        nn.Linear(84, data.num_classes),
    )


class Attention(nn.Module):
    """Self-attention, of each position with all others or with those before it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
        return self.out((scores.softmax(dim=-1) @ v).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Attention and a perceptron, each added to its normalised input."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


class Transformer(nn.Module):
    """A transformer: `embed` makes vectors of the positions; the head sees each of them, or their average."""

    def __init__(
        self,
        embed: nn.Module,
        length: int,
        width: int,
        outputs: int,
        *,
        depth: int = 2,
        causal: bool = False,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.pooled = embed, pooled
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=causal) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.embed(x) + self.positions))
        return self.head(x.mean(dim=-2) if self.pooled else x)


class Patches(nn.Module):
    """Rectangles of 2 x 4 pixels as vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.unfold(x, (2, 4), stride=(2, 4)).transpose(-1, -2))


def vision_transformer(data: Data) -> nn.Module:
    """8 patches of a digit, width 32."""
    return Transformer(Patches(32), 8, 32, data.num_classes, pooled=True)


def language_model(data: Data) -> nn.Module:
    """The next character after each of 32, width 32, one block."""
    return Transformer(nn.Embedding(data.num_classes, 32), CONTEXT, 32, data.num_classes, depth=1, causal=True)


class LowRankAdapter(nn.Module):
    """A linear layer that stays as it is, plus a product of two small matrices that is trained and starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@functools.cache
def pretrained_weights() -> dict[str, Tensor]:
    """Weights of a transformer that predicts the next word of training passages and other topics, as every run has."""
    texts, _ = passages()
    known = [texts[i] for i in cut_passages(ADAPTED).train[0]]
    x = word_numbers(known + other_passages(), known)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(nn.Embedding(VOCABULARY, 32), PASSAGE, 32, VOCABULARY, causal=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
        for _ in range(500):
            words = x[torch.randint(len(x), (16,))]
            optimizer.zero_grad()
            F.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten()).backward()
            optimizer.step()
            schedule.step()
    return {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}


def adapted_transformer(data: Data) -> nn.Module:
    """The pretrained transformer, frozen, with adapters of rank 4 for queries and values and a new head."""
    model = Transformer(nn.Embedding(VOCABULARY, 32), PASSAGE, 32, data.num_classes, causal=True, pooled=True)
    model.load_state_dict(pretrained_weights(), strict=False)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block.attention, name, LowRankAdapter(getattr(block.attention, name), rank=4))
    return model


class Recurrent(nn.Module):
    """An LSTM over the words of a passage; the average of its states is classified."""

    def __init__(self, words: int, width: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0].mean(dim=-2))


def recurrent(data: Data) -> nn.Module:
    """An LSTM with 32 units."""
    return Recurrent(VOCABULARY, 32, data.num_classes)


def group_norm(channels: int) -> nn.Module:
    """Groups of four channels."""
    return nn.GroupNorm(channels // 4, channels)


def no_norm(channels: int) -> nn.Module:
    """Nothing."""
    return nn.Identity()


CHOOSING: dict[str, Problem] = {
    "digits_mlp": Problem(digits(600, seed=10), perceptron(128, 128), epochs=80, batch_size=50),
    "digits_groupnorm": Problem(digits(600, seed=11), convolutions(group_norm, 8, 16, 16), epochs=30, batch_size=50),
    "fashion_1000": Problem(fashion(1000, seed=12), lenet, epochs=20, batch_size=50, needs="FashionMNIST"),
    "breast_cancer": Problem(load_breast_cancer, perceptron(64, 64), epochs=60, batch_size=32),
    "diabetes": Problem(load_diabetes, perceptron(64, 64), epochs=60, batch_size=32),
    "text_transformer": Problem(load_characters, language_model, epochs=5, batch_size=32),
    "text_lora": Problem(load_adapted, adapted_transformer, epochs=8, batch_size=32),
    "noisy_labels": Problem(digits(600, seed=13, noisy=0.2), perceptron(256, 128), epochs=60, batch_size=50),
    "long_run": Problem(digits(300, seed=14), convolutions(nn.BatchNorm2d, 8, 16, 16), epochs=150, batch_size=50),
    "short_run": Problem(load_concrete, perceptron(64, 64), epochs=20, batch_size=64, needs="uci/concrete"),
}
JUDGED: dict[str, Problem] = {
    "digits_batchnorm": Problem(digits(600, seed=15), residual_network, epochs=20, batch_size=50),
    "digits_vit": Problem(digits(600, seed=16), vision_transformer, epochs=20, batch_size=50),
    "digits_100": Problem(digits(100, seed=17), convolutions(no_norm, 8, 16, 16), epochs=100, batch_size=20),
    "fashion_10000": Problem(fashion(10_000, seed=18), lenet, epochs=4, batch_size=100, needs="FashionMNIST"),
    "wine_quality": Problem(
        load_wine_quality, perceptron(64, 64), epochs=40, batch_size=32, needs="uci/wine-quality-red"
    ),
    "kin8nm": Problem(load_kin8nm, perceptron(64, 64), epochs=20, batch_size=50, needs="uci/kin8nm"),
    "text_words": Problem(load_word_counts, perceptron(64), epochs=30, batch_size=32),
    "text_lstm": Problem(load_word_order, recurrent, epochs=12, batch_size=32),
}
PROBLEMS = CHOOSING | JUDGED
