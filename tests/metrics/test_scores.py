"""Scores of doubt."""

from types import SimpleNamespace

import pytest
import torch

import bsam
from bsam import metrics as M
from bsam.metrics.scores import Score
from tests.metrics.data import random_predictions, with_everything


def test_scores_are_their_definitions():
    p = with_everything(20, 4)
    probs = p.log_probs.exp()
    torch.testing.assert_close(M.doubt(p), 1 - probs.max(1).values)
    torch.testing.assert_close(M.doubt(p, "entropy"), -(probs * p.log_probs).sum(1))
    assert torch.equal(M.doubt(p, "energy"), p.energy.double())
    assert torch.equal(M.doubt(p, "mutual_information"), p.mutual_information.double())
    sure = torch.tensor([[1.0, 0.0]]).log()
    assert M.doubt((sure, torch.tensor([0])), "entropy").tolist() == [0.0]
    assert M.doubt((torch.tensor([[-1e-20, -46.05]], dtype=torch.float64), None)).item() == 1e-20


def test_predictions_have_all_scores():
    model = torch.nn.Linear(3, 4)
    posterior = bsam.DiagonalGaussian.from_model(model, {model.weight: torch.full((4, 3), 0.5)})
    x = torch.randn(6, 3)
    predictions = bsam.predict(model, posterior, x, num_samples=5, vectorise=False)
    for score in Score.__args__:
        assert M.doubt(predictions, score).shape == (6,)
    generator = torch.Generator().manual_seed(0)
    energies = []
    for _ in range(5):
        with posterior.sampled(model, generator), torch.no_grad():
            energies.append(-model(x).logsumexp(1))
    torch.testing.assert_close(M.doubt(predictions, "energy").float(), torch.stack(energies).mean(0))
    yes_no = bsam.predict(model, posterior, x, likelihood="bernoulli")
    assert yes_no.energy is None
    with pytest.raises(ValueError, match=r"have no energy. It needs logits: .*yes/no questions, files of earlier"):
        M.doubt(yes_no, "energy")


def test_padded_positions_have_no_doubt():
    tokens = torch.zeros(2, 3, 4).log_softmax(-1)
    tokens[1, 2] = torch.nan
    assert M.doubt((tokens, None)).isnan().nonzero().tolist() == [[1, 2]]


def test_what_is_missing_is_said():
    pair = random_predictions(5)
    with pytest.raises(ValueError, match=r"no mutual_information. Give the result of bsam.predict"):
        M.doubt(pair, "mutual_information")
    with pytest.raises(ValueError, match="score='msp' must be one of confidence, entropy"):
        M.doubt(pair, "msp")
    with pytest.raises(TypeError, match=r"must have .log_probs"):
        M.doubt(3)
    for log_probs in (torch.zeros(3), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match=r"with K >= 2 classes, got \(3"):
            M.doubt((log_probs, None))
    wrong = SimpleNamespace(log_probs=pair[0], labels=pair[1], energy=torch.zeros(4))
    with pytest.raises(ValueError, match=r"energy has shape \(4,\): it must have \(5,\)"):
        M.doubt(wrong, "energy")
