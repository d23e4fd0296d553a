"""The predictor against `predict`: as a module, and from a file."""

import copy
import os
import pickle
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bsam.files import write_file
from bsam.posterior import DiagonalGaussian, LowRankGaussian, Mixture, PointMass
from bsam.prediction import Predictor, predict
from tests.prediction.models import (
    WITH_STATISTICS_OF_THE_MEAN,
    Branching,
    ConvNet,
    D,
    Hoarder,
    K,
    Tied,
    assert_unchanged,
    classes,
    gaussian,
    images,
    mlp,
    seeded,
    state_of,
    vectors,
)

pytestmark = WITH_STATISTICS_OF_THE_MEAN


class Tokens(nn.Module):
    """(n, T) token numbers to (n, T, K) logits, by keywords and in a dictionary, as transformers' models have them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, D), nn.Linear(D, K)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return {"logits": self.head((self.embed(input_ids) * mask[..., None]).cumsum(1))}


def ids(n=6):
    return torch.randint(10, (n, 5), generator=torch.Generator().manual_seed(1))


REGRESSION = {"likelihood": "gaussian", "noise_std": 0.3}
CASES = {
    "classes": (mlp, vectors, {}),
    "BatchNorm": (ConvNet, images, {}),
    "tied": (Tied, vectors, {}),
    "tokens": (Tokens, ids, {}),
    "pixels": (lambda: nn.Conv2d(1, K, 3), images, {}),
    "classes last": (mlp, vectors, {"class_dim": -1}),
    "two classes": (lambda: mlp(1), vectors, {"likelihood": "bernoulli"}),
    "multi-label": (mlp, vectors, {"likelihood": "bernoulli"}),
    "regression": (lambda: mlp(1), vectors, REGRESSION),
    "two outputs": (lambda: mlp(2), vectors, REGRESSION),
}


def expected(model, posterior, data, **options):
    """What `predict` says, under the names of the predictor."""
    found = predict(model, posterior, data, vectorise=False, **options)
    if options.get("likelihood") == "gaussian":
        return {
            "mean": found.mean,
            "std": found.variance.sqrt(),
            "epistemic_std": found.epistemic_variance.sqrt(),
        }
    return {"probs": found.probs, "entropy": found.entropy, "mutual_information": found.mutual_information}


def assert_same(found, wanted, tolerance=1e-12):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), tensor, rtol=0, atol=tolerance)


# ---------------------------------------------------------------- as a module


@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_it_predicts_as_predict(case, vectorise):
    make, data, options = CASES[case]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        model, x = seeded(make, dtype), data(6)
        x = x.to(dtype) if x.is_floating_point() else x
        q = gaussian(model, 0.2)
        before = state_of(model)
        found = Predictor(model, q, num_samples=5, seed=3, vectorise=vectorise, **options)
        assert_unchanged(before, model)
        assert_same(found(x), expected(model, q, x, num_samples=5, seed=3, **options), tolerance)


@pytest.mark.parametrize("num_samples", [0, 1, 4])
def test_points_and_means(num_samples):
    model, x = seeded(ConvNet), images(5)
    for q in (PointMass.from_model(model), gaussian(model)):
        found = Predictor(model, q, num_samples=num_samples)
        assert_same(found(x), expected(model, q, x, num_samples=num_samples))


def test_a_low_rank_posterior():
    model, x = seeded(mlp), vectors(5)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    q = LowRankGaussian(
        weights,
        {name: torch.full_like(p, 0.01) for name, p in weights.items()},
        {name: 0.1 * torch.randn(3, *p.shape, dtype=p.dtype) for name, p in weights.items()},
    )
    assert_same(Predictor(model, q, num_samples=4)(x), expected(model, q, x, num_samples=4))


@pytest.mark.parametrize("options", [{}, REGRESSION], ids=["classes", "regression"])
def test_a_mixture(options, tmp_path):
    model, x = seeded(ConvNet if not options else lambda: mlp(1)), images(5) if not options else vectors(5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.3)
    parts = [gaussian(model, 0.2), PointMass.from_model(other), PointMass.from_model(model)]
    q = Mixture(parts, [1, 2, 3])
    found = Predictor(model, q, num_samples=4, seed=3, **options)
    assert found.num_samples == 6
    assert_same(found(x), expected(model, q, x, num_samples=4, seed=3, **options), 1e-7)
    found.save(tmp_path / "p")
    loaded = Predictor.load(tmp_path / "p", copy.deepcopy(model))
    assert_same(loaded(x), found(x), 0)
    loaded.weights[0] = 2.0
    loaded.save(tmp_path / "p")
    with pytest.raises(ValueError, match="weights must be 6 positive numbers that sum to 1"):
        Predictor.load(tmp_path / "p", model)
    points = Predictor(model, Mixture(parts[1:]), num_samples=100, **options)
    assert (points.num_samples, points.weights) == (2, None)
    program = points.export(x, dynamic_shapes=None).module()
    assert_same(program(x), points(x), 1e-10)


def test_points_are_stored_once():
    model, x = seeded(mlp), vectors(5)
    q = DiagonalGaussian.from_model(model, {p: torch.full_like(p, 0.2) for p in model[3].parameters()})
    found = Predictor(model, q, num_samples=7)
    assert_same(found(x), expected(model, q, x, num_samples=7))
    sizes = {name: tensor.numel() for name, tensor in found.state_dict().items()}
    head = sum(p.numel() for p in model[3].parameters())
    assert sum(sizes.values()) == sum(p.numel() for p in model[0].parameters()) + 7 * head
    members = found._all_members()
    assert all(member.model[0].weight is found.network.model[0].weight for member in members)
    assert members[2].model[3].weight.data_ptr() == found.samples.get_buffer("3/weight")[2].data_ptr()
    assert found._all_members() is members  # made once


def test_the_model_may_go_on():
    """The predictor has its own copy, and holds the posterior's weights whatever the model holds."""
    model, other, x = seeded(ConvNet), seeded(ConvNet, seed=1), images(5)
    q = gaussian(model)
    found = Predictor(other, q, num_samples=3)
    wanted = expected(model, q, x, num_samples=3)
    with torch.no_grad():
        for tensor in (*other.parameters(), other.body[1].running_mean):
            tensor.add_(1)
    assert_same(found(x), wanted)
    assert not any(p.requires_grad for p in found.parameters())


def test_it_stays_in_evaluation_mode():
    model, x = seeded(ConvNet), images(5)
    found = Predictor(model, gaussian(model), num_samples=3)
    wanted = found(x)
    assert not found.train().training
    assert not any(module.training for module in found.modules())
    assert_same(found(x), wanted)


def test_it_is_a_module_like_any_other():
    model, x = seeded(mlp), vectors(5)
    q = gaussian(model)
    found = Predictor(model, q, num_samples=3)
    wanted = found(x)
    other = Predictor(model, q, num_samples=3, seed=1)
    other(x)
    other.load_state_dict(found.state_dict())
    assert_same(other(x), wanted)
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert_same(twin(x), wanted)
    assert_same(found.float()(x.float()), {name: t.float() for name, t in wanted.items()}, 1e-6)
    assert_same(found.double()(x), wanted, 1e-6)
    assert "num_samples=3" in repr(found)


def test_gradients_of_the_inputs():
    model, x = seeded(mlp), vectors(5).requires_grad_()
    found = Predictor(model, gaussian(model), num_samples=3)
    (gradient,) = torch.autograd.grad(found(x)["mutual_information"].sum(), x)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")], ids=["DataParallel", "compile"]
)
def test_a_wrapped_model(wrap, tmp_path):
    model, x = seeded(ConvNet), images(5)
    q = gaussian(model)
    found = Predictor(wrap(model), q, num_samples=3)
    wanted = expected(model, q, x, num_samples=3)
    assert_same(found(x), wanted)
    found.save(tmp_path / "p")
    assert_same(Predictor.load(tmp_path / "p", wrap(seeded(ConvNet, seed=2)))(x), wanted)


def test_a_compiled_layer(tmp_path):
    model, plain, x = seeded(mlp), seeded(mlp), vectors(5)
    model[0] = torch.compile(model[0], backend="eager")
    found = Predictor(model, gaussian(model), num_samples=3)
    wanted = expected(plain, gaussian(plain), x, num_samples=3)
    assert_same(found(x), wanted)
    found.save(tmp_path / "p")
    assert_same(Predictor.load(tmp_path / "p", plain)(x), wanted)


@pytest.mark.parametrize("num_samples", [0, 4])
def test_recalibrated_statistics(num_samples, tmp_path):
    model, x, train = seeded(ConvNet), images(9), images(40)
    q = gaussian(model, 0.1)
    loader = DataLoader(TensorDataset(train, classes(40)), batch_size=16)
    before = state_of(model)
    found = Predictor(model, q, num_samples=num_samples, recalibrate=loader)
    assert_unchanged(before, model)
    wanted = expected(model, q, x, num_samples=num_samples, recalibrate=loader)
    assert_same(found(x), wanted, 1e-9)
    found.save(tmp_path / "p")
    assert_same(Predictor.load(tmp_path / "p", model)(x), wanted, 1e-9)
    assert_same(Predictor(model, q, num_samples=num_samples, recalibrate=train, batch_size=16)(x), wanted, 1e-1)
    with pytest.raises(TypeError, match="recalibrate is a generator"):
        Predictor(model, q, recalibrate=(t for t in [train]))


def test_statistics_of_the_mean_are_warned_of():
    model, x = seeded(ConvNet), images(5)
    with pytest.warns(UserWarning, match="the running statistics of BatchNorm belong") as caught:
        found = Predictor(model, gaussian(model), num_samples=3)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked_for = Predictor(model, gaussian(model), num_samples=3, recalibrate=False)
        assert_same(asked_for(x), found(x))


def test_it_is_called_as_the_model_is():
    model, x = seeded(Tokens), ids()
    q, mask = gaussian(model), torch.ones(6, 5, dtype=torch.long).tril()
    wanted = expected(model, q, {"input_ids": x, "attention_mask": mask}, num_samples=3)
    found = Predictor(model, q, num_samples=3)
    calls = [
        lambda: found(x, mask),
        lambda: found(x, attention_mask=mask),
        lambda: found(input_ids=x, attention_mask=mask),
        lambda: found({"input_ids": x, "attention_mask": mask}),
        lambda: found((x, mask)),
    ]
    for call in calls:
        assert_same(call(), wanted)
    by_hand = Predictor(model, q, num_samples=3, forward=lambda model, batch: model(batch["a"], batch["b"]))
    assert_same(by_hand({"a": x, "b": mask}), wanted)
    assert_same(by_hand(a=x, b=mask), wanted)
    with pytest.raises(TypeError, match="takes one argument"):
        by_hand(x, b=mask)


@pytest.mark.parametrize("make", [Hoarder, Branching])
def test_models_that_vmap_refuses(make, monkeypatch, request):
    model, x = seeded(make), vectors(5)
    q = gaussian(model)
    wanted = expected(model, q, x, num_samples=3)
    assert_same(Predictor(model, q, num_samples=3)(x), wanted)
    with pytest.raises((RuntimeError, TypeError)):
        Predictor(model, q, num_samples=3, vectorise=True)(x)
    request.getfixturevalue("_try_vmap")
    found = Predictor(model, q, num_samples=3)
    with pytest.warns(UserWarning, match="in a loop over the samples, because vmap failed"):
        assert_same(found(x), wanted)
    assert_same(found(x), wanted)  # warned once


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": -1}, "num_samples=-1 must be an integer >= 0"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"likelihood": "poisson"}, "likelihood='poisson' must be one of"),
        ({"likelihood": "gaussian"}, "noise_std=None must be"),
        ({"likelihood": "bernoulli", "class_dim": 1}, "class_dim=1 is only for"),
    ],
)
def test_options_that_are_refused(options, message):
    model = seeded(mlp)
    with pytest.raises(ValueError, match=message):
        Predictor(model, gaussian(model), **options)
    with pytest.raises(ValueError, match="does not fit the model"):
        Predictor(model, gaussian(seeded(ConvNet)))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("case", CASES)
def test_save_and_load(case, tmp_path):
    make, data, options = CASES[case]
    model, x = seeded(make), data(6)
    x = x.double() if x.is_floating_point() else x
    found = Predictor(model, gaussian(model), num_samples=4, seed=2, **options)
    found.save(tmp_path / "p.safetensors")
    assert os.listdir(tmp_path) == ["p.safetensors"]
    other = seeded(make, seed=5)
    before = state_of(other)
    loaded = Predictor.load(tmp_path / "p.safetensors", other)
    assert_unchanged(before, other)
    assert_same(loaded(x), found(x), 0)
    assert repr(loaded) == repr(found)
    loaded.save(tmp_path / "again")
    files = [load_file(tmp_path / name) for name in ("p.safetensors", "again")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_a_file_has_points_once(tmp_path):
    model = seeded(mlp)
    q = DiagonalGaussian.from_model(model, {p: torch.full_like(p, 0.2) for p in model[3].parameters()})
    Predictor(model, q, num_samples=7).save(tmp_path / "p")
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "p").items()}
    assert shapes == {
        "sample/3.weight": (7, K, 8),
        "sample/3.bias": (7, K),
        "point/0.weight": (8, D),
        "point/0.bias": (8,),
    }


def test_a_file_with_a_function(tmp_path):
    model, x = seeded(mlp), vectors(5)

    def forward(model, inputs):
        return 2 * model(inputs)

    found = Predictor(model, gaussian(model), num_samples=3, forward=forward)
    found.save(tmp_path / "p")
    assert_same(Predictor.load(tmp_path / "p", model, forward=forward)(x), found(x), 0)


def test_load_refuses(tmp_path):
    model, path = seeded(mlp), tmp_path / "p"
    found = Predictor(model, gaussian(model), num_samples=3)
    found.save(path)
    with pytest.raises(ValueError, match=r"the predictor does not fit the model: the predictor lacks body\.0"):
        Predictor.load(path, seeded(ConvNet))
    with pytest.raises(ValueError, match=r"3.weight \(3, 8\) in the predictor, \(4, 8\) in the model"):
        Predictor.load(path, seeded(lambda: mlp(4)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + b"\0" * 8)
    with pytest.raises(ValueError, match="is damaged"):
        Predictor.load(path, model)
    gaussian(model).save(path)
    with pytest.raises(ValueError, match=r"format='bsam\.posterior': expected 'bsam\.predictor'"):
        Predictor.load(path, model)
    good = {"likelihood": "categorical", "noise_std": None, "class_dim": None, "num_samples": 3, "seed": 0}
    tensors = {f"sample/{name}": torch.zeros(3, *p.shape) for name, p in model.named_parameters()}
    for settings, more, message in (
        (good | {"likelihood": "poisson"}, {}, "poisson"),
        (good | {"num_samples": 4}, {}, "first dimension must be num_samples"),
        (good | {"num_samples": True}, {}, "num_samples"),
        (good | {"num_samples": 0}, {}, "first dimension must be num_samples"),
        ({}, {}, "num_samples"),
        (good, {"other/0.weight": torch.zeros(1)}, "other"),
    ):
        write_file(path, tensors | more, format="bsam.predictor", kind="ensemble", settings=settings)
        with pytest.raises(ValueError, match=message) as caught:
            Predictor.load(path, model)
        assert str(path) in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding differs between loop and vmap
    for case in ("BatchNorm", "tokens", "regression"):
        make, data, options = CASES[case]
        model, x = seeded(make, torch.float32).cuda(), data(6)
        x = (x.float() if x.is_floating_point() else x).cuda()
        q = gaussian(model, 0.2)
        found = Predictor(model, q, num_samples=5, **options)
        wanted = {name: t.cuda() for name, t in expected(model, q, x, num_samples=5, **options).items()}
        assert_same(found(x), wanted, 1e-5)
        assert_same(found.export(x).module()(x), wanted, 1e-5)
        cpu = found.cpu()
        assert_same(cpu(x.cpu()), {name: t.cpu() for name, t in wanted.items()}, 1e-5)
