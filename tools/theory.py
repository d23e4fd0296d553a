"""The tables of the page on the theory, from the numbers that `bsam figure numbers` computes."""

from __future__ import annotations

from typing import Any

from bsam.experiments.figures.data_sets import prior_name
from bsam.experiments.figures.logistic import METHODS

__all__ = ["theory_markdown"]

_RELAXED = {
    "bayes": "Bayes, $f$",
    "relaxed": r"relaxed Bayes, $f^{\ast\ast}$",
    "sampled": r"$f^{\ast\ast}$ by sampled tangents",
}


def theory_markdown(record: dict[str, Any]) -> dict[str, str]:
    """Write the tables of the page on the theory, by part of the record."""
    part = record["logistic"]
    first = "mean confidence | separating | distance to exact | variances"
    head = rf"| method | {first} | by $s_\ast$ | by the fixed point |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for name, title in METHODS.items():
        distance = part["total_variation_to_exact"].get(name)
        columns = [part[key].get(name) for key in ("variances", "variances_by_s_star", "variances_by_fixed_point")]
        cells = [f"{part[key][name]:.3f}" for key in ("mean_confidence", "mass_on_separating_weights")]
        cells += ["-" if distance is None else f"{distance:.4f}", *map(_pair, columns)]
        rows.append(f"| {title} | {' | '.join(cells)} |")
    excess = " | ".join(f"median excess: {name}" for name in ("SAM", "bSAM", "Laplace"))
    sets = [f"| prior | data sets | SAM over | Laplace under | bSAM closest | {excess} |"]
    sets.append("|---|---|---|---|---|---|---|---|")
    for row in record["data_sets"]:
        count, over = row["num_sets"], row["overconfident"]
        cells = [prior_name(row["prior_precision"]), f"{count}, {'' if row['separable'] else 'not '}separable"]
        cells += [f"{share / count:.0%}" for share in (over["sam"], count - over["laplace"], row["bsam_closest"])]
        cells += [f"{row['median_excess'][name]:+.4f}" for name in ("sam", "bsam", "laplace")]
        sets.append(f"| {' | '.join(cells)} |")
    relaxed = record["relaxed_bayes"]
    others = [r"| objective | variances | ELBO | gap $f - f^{\ast\ast}$ |", "|---|---|---|---|"]
    for name, title in _RELAXED.items():
        cells = [_pair(relaxed["variances"][name], decimals=4)]
        cells += [f"{relaxed[key][name]:.2f}" for key in ("elbo", "elbo_gap")]
        others.append(f"| {title} | {' | '.join(cells)} |")
    reported = relaxed["elbo_gap_reported_by_sampled_tangents"]
    others.append(f"| what {relaxed['num_tangents']} sampled tangents report there | | | {reported:.2f} |")
    return {"logistic": "\n".join(rows), "data_sets": "\n".join(sets), "relaxed_bayes": "\n".join(others)}


def _pair(values: list[float] | None, decimals: int = 3) -> str:
    return "-" if values is None else ", ".join(f"{value:.{decimals}f}" for value in values)
