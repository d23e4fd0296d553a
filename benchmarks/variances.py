"""What the variances of a posterior are for: pruning, and finding wrong labels.

    python benchmarks/variances.py pruning --data DATA --out results/pruning.json
    python benchmarks/variances.py sensitivity --data DATA --out results/sensitivity.json
    python benchmarks/variances.py draw                 # docs/images/variances from both records

A network learns FashionMNIST with bSAM, its default settings, and a learning rate that falls to 0 as a cosine.

- pruning: the MLP 784-500-300-9, and all training images. A share of the weights is kept, chosen by signal-to-noise
  ratio or by magnitude. The record has accuracy and NLL on the test images, at the mean and averaged over samples of
  what is left.
- sensitivity: LeNet-5, and some of the training images, with 5% of their labels replaced by a random other class. The
  examples are ordered by each score, and the share of wrong labels among the first 5% is the score's precision.
  `bsam.sensitivity` gives the change of the loss, of the outputs and of the probabilities, and with the loss itself an
  estimate of the loss of a model that has not seen the example. The loss, and the margin (probability of the best other
  class minus that of the label), at the mean of the same posterior, need no variances.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bsam
from bsam.experiments.data import load
from bsam.experiments.models import make_model
from bsam.experiments.record import environment, read_json, write_json
from bsam.experiments.style import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, RED, in_print, new_figure, save

SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005)
NUM_SAMPLES = 8
BATCH_SIZE = 100
FLIPPED = 0.05
IMAGES = Path("docs/images/variances")


def train(name: str, x: Tensor, y: Tensor, epochs: int, seed: int, visit: Any = None) -> tuple[nn.Module, bsam.BSAM]:
    """Train a network with bSAM; `visit(epoch, model, optimizer)` is called after each epoch."""
    model = make_model(name, num_classes=10, image_shape=(1, 28, 28), seed=seed)
    optimizer = bsam.BSAM(model.parameters(), num_data=len(x), module=model, seed=seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // BATCH_SIZE))
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for index in torch.randperm(len(x), generator=generator).split(BATCH_SIZE):
            loss = optimizer.step(lambda x, y: F.cross_entropy(model(x), y), x[index], y[index])
            scheduler.step()
            total += float(loss) * len(index)
        print(f"epoch {epoch}: loss {total / len(x):.4f}, {time.process_time():.0f} s of CPU", flush=True)
        if visit is not None:
            visit(epoch, model, optimizer)
    return model, optimizer


def images(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test images, ready for the network, with their labels."""
    data = load("fashionmnist", folder, download=False)
    return (data.normalise(data.train[0]), data.train[1]), (data.normalise(data.test[0]), data.test[1])


def prune(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, prune by both orders, and measure."""
    (x, y), test = images(arguments.data)
    model, optimizer = train("mlp", x, y, arguments.epochs, arguments.seed)
    posterior = optimizer.posterior(model)
    rows = []
    for by in ("signal_to_noise", "magnitude"):
        for keep in SHARES:
            pruned = posterior.pruned(keep, by=by)
            row: dict[str, Any] = {"by": by, "keep": keep}
            for num_samples, name in ((0, "mean"), (NUM_SAMPLES, "averaged")):
                found = bsam.predict(model, pruned, test, num_samples=num_samples, progress=False)
                metrics = bsam.metrics.summary(found, num_bootstrap=0)
                row[name] = {"accuracy": metrics.accuracy, "nll": metrics.nll}
            rows.append(row)
            print(row, flush=True)
    ratios = torch.cat([r.flatten() for r in posterior.signal_to_noise().values()])
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    return {
        "what": "weights of a bSAM posterior pruned by signal-to-noise ratio and by magnitude; benchmarks/variances.py",
        "config": {"data": "fashionmnist", "model": "mlp", "num_train": len(x), "num_samples": NUM_SAMPLES},
        "num_weights": posterior.num_parameters,
        "signal_to_noise": dict(zip(map(str, levels.tolist()), ratios.quantile(levels).tolist(), strict=True)),
        "rows": rows,
    }


def flip(y: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return labels of which a share is replaced by a random other class, and which those are."""
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.zeros(len(y), dtype=torch.bool)
    flipped[torch.randperm(len(y), generator=generator)[: round(share * len(y))]] = True
    other = (y + torch.randint(1, 10, y.shape, generator=generator)) % 10
    return torch.where(flipped, other, y), flipped


def scores(model: nn.Module, posterior: bsam.DiagonalGaussian, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return one score per training example, larger for those that look wrong."""
    log_p = bsam.predict(model, posterior, x, num_samples=0, progress=False).log_probs
    own = log_p.gather(1, y[:, None])[:, 0]
    best_other = log_p.scatter(1, y[:, None], -torch.inf).amax(dim=1)
    found = bsam.sensitivity(model, posterior, (x, y))
    return {
        "loss_change": found.loss_change,
        "output_change": found.output_change.norm(dim=1),
        "prediction_change": found.prediction_change.norm(dim=1),
        "leverage": found.leverage,
        "loss": -own,
        "loss_without": -own + found.loss_change,  # the loss of a model that has not seen the example
        "margin": best_other.exp() - own.exp(),
    }


def precision(score: Tensor, flipped: Tensor) -> dict[str, Any]:
    """Return the share of wrong labels among the first as many, and the curve of wrong labels found."""
    order = score.argsort(descending=True, stable=True)
    found = flipped[order].double().cumsum(dim=0)
    k = int(flipped.sum())
    looked = [round(share * len(order)) for share in (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2)]
    curve = [[n / len(order), float(found[n - 1]) / k] for n in looked]
    return {"precision_at_5%": float(found[k - 1]) / k, "found": curve}


def find_flips(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on labels of which some are wrong, and see which scores find them."""
    (x, y), test = images(arguments.data)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(arguments.seed))[: arguments.num_train]
    x, (y, flipped) = x[chosen], flip(y[chosen], FLIPPED, arguments.seed)
    epochs: list[dict[str, Any]] = []

    def visit(epoch: int, model: nn.Module, optimizer: bsam.BSAM) -> None:
        if epoch not in (arguments.epochs // 6, arguments.epochs):
            return
        posterior = optimizer.posterior(model)
        rated = bsam.metrics.summary(bsam.predict(model, posterior, test, num_samples=0), num_bootstrap=0)
        with_wrong = bsam.metrics.summary(bsam.predict(model, posterior, (x, y), num_samples=0), num_bootstrap=0)
        each = {name: precision(score, flipped) for name, score in scores(model, posterior, x, y).items()}
        row = {"epoch": epoch, "test_accuracy": rated.accuracy, "train_accuracy": with_wrong.accuracy, "scores": each}
        print(row, flush=True)
        epochs.append(row)

    train("lenet5", x, y, arguments.epochs, arguments.seed, visit)
    return {
        "what": "which scores find the 5% of training labels that are wrong; benchmarks/variances.py explains them",
        "config": {"data": "fashionmnist", "model": "lenet5", "num_train": len(x), "flipped": int(flipped.sum())},
        "epochs": epochs,
    }


# The figures


def draw_pruning(record: dict[str, Any], path: Path) -> None:
    """Draw accuracy and NLL against the share of weights that is kept."""
    figure = new_figure(5.2, 6.4)
    styles = {"signal_to_noise": (BLUE, "o", "signal-to-noise"), "magnitude": (RED, "s", "magnitude")}
    for axes, metric, title in zip(figure.subplots(2, 1), ("accuracy", "nll"), ("accuracy", "NLL"), strict=True):
        for by, (colour, marker, label) in styles.items():
            rows = [row for row in record["rows"] if row["by"] == by]
            kept = [100 * row["keep"] for row in rows]
            # Both kinds nearly agree, so a ring stands around each point.
            for kind, line, look in (("averaged", "-", {"ms": 4}), ("mean", ":", {"ms": 8, "mfc": "none"})):
                text = f"{label}, {'samples' if kind == 'averaged' else 'mean'}"
                values = [row[kind][metric] for row in rows]
                axes.plot(kept, values, color=colour, marker=marker, ls=line, label=text, **look)
        axes.set(xscale="log", xlabel="weights kept (%)", ylabel=title)
        axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    save(figure, path)


def draw_sensitivity(record: dict[str, Any], path: Path) -> None:
    """Draw the share of wrong labels found against the share of examples looked at."""
    figure = new_figure(5.2, 7.6)
    colours = {
        "loss_change": (BLUE, "change of the loss"),
        "loss_without": (BLACK, "loss without the example"),
        "output_change": (GREEN, "change of the outputs"),
        "prediction_change": (PURPLE, "change of the probabilities"),
        "loss": (RED, "loss"),
        "margin": (ORANGE, "margin"),
    }
    for axes, row in zip(figure.subplots(2, 1), record["epochs"], strict=True):
        for name, (colour, label) in colours.items():
            looked, found = zip(*row["scores"][name]["found"], strict=True)
            line = "--" if name in ("loss", "margin") else "-"
            axes.plot([100 * n for n in looked], [100 * n for n in found], color=colour, ls=line, label=label)
        axes.plot([0, 5, 20], [0, 100, 100], color=GRAY, lw=1, ls=":", label="best possible")
        labels = {"xlabel": "training examples looked at (%)", "ylabel": "wrong labels found (%)"}
        axes.set(title=f"after {row['epoch']} epochs", **labels)
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pruning", "sensitivity", "draw"])
    parser.add_argument("--data", type=Path, default=Path("data"), help="Folder with FashionMNIST.")
    parser.add_argument("--out", type=Path, help="The record.")
    parser.add_argument("--epochs", type=int, help="6 for pruning and 30 for sensitivity by default.")
    parser.add_argument("--num-train", type=int, default=10_000, help="Training images, for sensitivity.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "draw":
        results = Path("results")
        with in_print():
            draw_pruning(read_json(results / "pruning.json"), IMAGES / "pruning.svg")
            draw_sensitivity(read_json(results / "sensitivity.json"), IMAGES / "wrong_labels.svg")
        return
    arguments.epochs = arguments.epochs or (6 if arguments.what == "pruning" else 30)
    begin, cpu = time.perf_counter(), time.process_time()
    record = prune(arguments) if arguments.what == "pruning" else find_flips(arguments)
    record["config"] |= {"epochs": arguments.epochs, "batch_size": BATCH_SIZE, "seed": arguments.seed}
    times = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    if arguments.out is not None:
        write_json(arguments.out, {**record, **times, "environment": environment()})


if __name__ == "__main__":
    main()
