"""The tables of what variances are for, from the records of `benchmarks/variances.py`."""

from __future__ import annotations

from typing import Any

__all__ = ["pruning_markdown", "sensitivity_markdown"]

_SCORES = {
    "loss": "loss",
    "margin": "margin",
    "loss_change": "change of the loss, `loss_change`",
    "loss_without": "loss without the example, loss + `loss_change`",
    "output_change": "change of the outputs, length of `output_change`",
    "prediction_change": "change of the probabilities, length of `prediction_change`",
}


def pruning_markdown(record: dict[str, Any]) -> str:
    """Write accuracy and NLL, averaged over samples, against the share of weights that is kept."""
    lines = [
        "| weights kept | accuracy, by signal-to-noise | accuracy, by magnitude "
        "| NLL, by signal-to-noise | NLL, by magnitude |",
        "|---|---|---|---|---|",
    ]
    rows = {(row["by"], row["keep"]): row["averaged"] for row in record["rows"]}
    for keep in dict.fromkeys(row["keep"] for row in record["rows"]):
        pair = [rows[by, keep] for by in ("signal_to_noise", "magnitude")]
        accuracy = [f"{each['accuracy']:.2%}" for each in pair]
        nll = [f"{each['nll']:.3f}" for each in pair]
        lines.append(f"| {100 * keep:g}% | {' | '.join(accuracy + nll)} |")
    return "\n".join(lines)


def sensitivity_markdown(record: dict[str, Any]) -> str:
    """Write which share of the first 5% of the examples has a wrong label, by score."""
    epochs = record["epochs"]
    titles = [f"after {row['epoch']} epochs" for row in epochs]
    lines = [
        f"| ordered by | {' | '.join(titles)} |",
        f"|---{'|---' * len(epochs)}|",
    ]
    for score, title in _SCORES.items():
        cells = [f"{row['scores'][score]['precision_at_5%']:.1%}" for row in epochs]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
