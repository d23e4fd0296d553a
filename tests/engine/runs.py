"""Runs for the tests of `TrainStep`: a model and its optimizer, stepped by the engine or by the plain loop."""

import copy
import shutil

import pytest
import torch
from torch import nn

from bsam import TrainStep
from tests.networks import make_batch, make_network, mean_loss
from tests.optim.contract import assert_same
from tests.optimizers import METHODS, make

SPLITS = 4
PROBING = list(METHODS)


TORCH = {
    "SGD": lambda params, **options: torch.optim.SGD(params, lr=0.1, momentum=0.9, **options),
    "Adam": lambda params, **options: torch.optim.Adam(params, lr=0.01, **options),
}

GAUSSIAN = [name for name in PROBING if METHODS[name].gaussian]


def make_optimizer(name, params, module, seed=0, **options):
    if name in TORCH:
        return TORCH[name](params, **options)
    own = {"seed": seed} if name in GAUSSIAN else {}
    return make(name, params, module=module, **{"splits": SPLITS, **own, **options})


every_optimizer = pytest.mark.parametrize("name", [*PROBING, *TORCH])


class Run:
    """A model and its optimizer, stepped by a `TrainStep` or by the plain loop."""

    def __init__(self, name, network="mlp", *, seed=0, params=nn.Module.parameters, **options):
        self.model = make_network(network, seed)
        self.name = name
        self.optimizer = make_optimizer(name, params(self.model), self.model, seed, **options)
        self.loss_fn = mean_loss(self.model)

    def engine(self, batch, **options):
        options = {"compile": False, "module": self.model, **options}
        return TrainStep(self.optimizer, self.loss_fn, batch, **options)

    def loop(self, *batch):
        if self.name in PROBING:
            return self.optimizer.step(self.loss_fn, *batch)
        self.optimizer.zero_grad()
        loss = self.loss_fn(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self):
        """Everything that training changes, as copies."""
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def addresses(self):
        return [t.data_ptr() for t in (*self.model.parameters(), *self.model.buffers())]


def network_of(name):
    """VOGN refuses BatchNorm, which mixes examples."""
    return "convolutional" if name in METHODS and METHODS[name].per_example else "normalised"


def batches_of(network, count, size=16):
    return [make_batch(network, size, seed) for seed in range(count)]


def stack(batches):
    return tuple(torch.stack(column) for column in zip(*batches, strict=True))


def stacked(runs, batches, **options):
    """One step of several runs."""
    return TrainStep(
        [run.optimizer for run in runs],
        [run.loss_fn for run in runs],
        stack(batches),
        module=[run.model for run in runs],
        **{"compile": False, **options},
    )


needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)


def spoiled(batch):
    x, y = batch
    x = x.clone()
    x[9] = torch.inf
    return x, y


def refuses(runs, make, error, message):
    """`make()` raises, and nothing has changed: not even where the weights are."""
    before, addresses = [run.state() for run in runs], [run.addresses() for run in runs]
    with pytest.raises(error, match=message):
        make()
    assert_same([run.state() for run in runs], before)
    assert [run.addresses() for run in runs] == addresses


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Wide(nn.Module):
    """Convolutions wide enough for our own kernels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


FLOAT32 = {
    "BSAM": {"lr": 0.1, "prior_precision": 25.0},
    "SAM-SGD": {"rho": 0.1},
    "SAM-Adam": {"rho": 0.1},
    "VOGN": {"lr": 0.01, "prior_precision": 25.0, "damping": 0.01},
}
"""Rates at which the tolerances of float32 below were found."""


def on_gpu(name, seed=0, dtype=torch.float32, device="cuda", **options):
    run = Run(name, seed=seed)
    torch.manual_seed(seed)
    run.model = Wide().to(device, dtype)
    if name == "VOGN":
        run.model.layers[1] = nn.Identity()
    parameters = options.pop("params", nn.Module.parameters)(run.model)
    run.optimizer = make_optimizer(name, parameters, run.model, seed, **{**FLOAT32.get(name, {}), **options})
    run.loss_fn = mean_loss(run.model)
    return run


def gpu_batch(seed=0, size=16, dtype=torch.float32, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 8, 8, generator=generator, dtype=dtype)
    return x.to(device), torch.randint(4, (size,), generator=generator).to(device)
