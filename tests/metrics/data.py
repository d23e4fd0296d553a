"""Random predictions for the tests of metrics."""

from types import SimpleNamespace

import torch


def random_predictions(n, num_classes=10, seed=0, dtype=torch.float64, levels=None):
    """Overconfident log-probabilities; `levels` rounds the logits so that confidences tie."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, num_classes, generator=g, dtype=torch.float64)
    if levels:
        logits = (logits * levels).round() / levels
    labels = torch.multinomial(logits.softmax(1), 1, generator=g).squeeze(1)
    return (2 * logits).log_softmax(1).to(dtype), labels


def with_everything(n, num_classes=10, seed=0):
    """What `bsam.predict` returns: also the mutual information and the energy."""
    log_probs, labels = random_predictions(n, num_classes, seed)
    g = torch.Generator().manual_seed(seed + 1000)
    return SimpleNamespace(
        log_probs=log_probs,
        labels=labels,
        mutual_information=torch.rand(n, generator=g),
        energy=torch.randn(n, generator=g),
    )
