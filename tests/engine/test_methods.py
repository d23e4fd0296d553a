"""torch's optimizers with the interface of our methods."""

import torch

from tests.engine.runs import Run, refuses
from tests.networks import make_batch


def test_optimizers_that_evaluate_the_loss_are_refused():
    run = Run("SGD")
    run.optimizer = torch.optim.LBFGS(run.model.parameters())
    refuses([run], lambda: run.engine(make_batch("mlp", 16)), ValueError, "LBFGS evaluates the loss by itself")
