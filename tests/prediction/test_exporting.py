"""Exported predictors: programs of torch.export and ONNX files, against `predict`."""

import importlib.util
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from bsam.posterior import DiagonalGaussian, PointMass
from bsam.prediction import Predictor, exporting
from tests.prediction.models import (
    WITH_STATISTICS_OF_THE_MEAN,
    Branching,
    D,
    Hoarder,
    K,
    gaussian,
    mlp,
    seeded,
    vectors,
)
from tests.prediction.test_predictor import CASES, Tokens, assert_same, expected, ids

pytestmark = WITH_STATISTICS_OF_THE_MEAN
OLD = torch.__version__ < exporting._OLDEST_FOR_ONNX  # no loops in programs, and an exporter to ONNX that fails
needs_onnx = pytest.mark.skipif(
    OLD or not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs torch 2.11 or newer, and pip install '.[export]'",
)


class Recurrent(nn.Module):
    """vmap has no rule for an LSTM, and a loop in an exported program has none either."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, 5, batch_first=True), nn.Linear(5, K)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def sequences(n=6):
    return torch.randn(n, 7, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def exportable(case, num_samples=3):
    make, data, options = CASES[case]
    model, x = seeded(make, torch.float32), data(6)
    x = x.float() if x.is_floating_point() else x
    q = gaussian(model, 0.2)
    return (
        Predictor(model, q, num_samples=num_samples, **options),
        x,
        lambda x: expected(model, q, x, num_samples=num_samples, **options),
    )


@pytest.mark.parametrize("unroll", [None, True])
@pytest.mark.parametrize("case", ["BatchNorm", "tied", "tokens", "regression"])
def test_an_exported_program(case, unroll):
    found, x, wanted = exportable(case)
    program = found.export(x, unroll=unroll)
    for n in (6, 1, 3):
        assert_same(program.module()(x[:n]), wanted(x[:n]), 1e-6)
    loops = sum(node.op == "call_function" and "scan" in str(node.target) for node in program.graph.nodes)
    assert loops == (0 if unroll or OLD else 1)
    assert_same(found(x), wanted(x), 1e-6)  # and it still predicts


@pytest.mark.skipif(OLD, reason="needs torch 2.11 or newer")
def test_torch_export_takes_it_too():
    found, x, wanted = exportable("BatchNorm")
    with torch.no_grad():
        program = torch.export.export(found, (x,))
    assert_same(program.module()(x), wanted(x), 1e-6)


def run_onnx(path, **inputs):
    import onnxruntime

    session = onnxruntime.InferenceSession(os.fspath(path))
    names = [output.name for output in session.get_outputs()]
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, found, strict=True))


@needs_onnx
@pytest.mark.parametrize("case", ["BatchNorm", "pixels", "multi-label", "two outputs"])
def test_an_onnx_file(case, tmp_path):
    found, x, wanted = exportable(case)
    found.to_onnx(tmp_path / "p.onnx", x)
    assert os.listdir(tmp_path) == ["p.onnx"]
    assert b".py" not in (tmp_path / "p.onnx").read_bytes()  # no paths of this machine
    for n in (6, 1):
        assert_same(run_onnx(tmp_path / "p.onnx", input=x[:n]), wanted(x[:n]), 1e-6)


@needs_onnx
def test_an_onnx_file_with_keywords(tmp_path):
    model, x = seeded(Tokens, torch.float32), ids()
    q, mask = gaussian(model), torch.ones(6, 5, dtype=torch.long).tril()
    batch = {"input_ids": x, "attention_mask": mask}
    Predictor(model, q, num_samples=3).to_onnx(tmp_path / "p.onnx", batch)
    found = run_onnx(tmp_path / "p.onnx", input_ids=x[:2], attention_mask=mask[:2])
    assert_same(found, expected(model, q, {name: t[:2] for name, t in batch.items()}, num_samples=3), 1e-6)


@needs_onnx
def test_transformer_layers_are_exported(tmp_path):
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(24, K)]
    model = seeded(lambda: nn.Sequential(*layers), torch.float32)
    x, q = torch.randn(5, 3, 8), gaussian(model, 0.05)
    Predictor(model, q, num_samples=3).to_onnx(tmp_path / "p.onnx", x, unroll=False)
    assert_same(run_onnx(tmp_path / "p.onnx", input=x[:2]), expected(model, q, x[:2], num_samples=3), 1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


@needs_onnx
@pytest.mark.parametrize(("make", "data"), [(Recurrent, sequences), (Hoarder, vectors)])
def test_what_has_no_loop_is_unrolled(make, data, tmp_path):
    model, x = seeded(make, torch.float32), data(5).float()
    q = gaussian(model, 0.2)
    found = Predictor(model, q, num_samples=3)
    with pytest.raises(RuntimeError, match=r"cannot be exported \(stacked: "):
        found.export(x, unroll=False)
    found.to_onnx(tmp_path / "p.onnx", x)
    assert_same(run_onnx(tmp_path / "p.onnx", input=x[:2]), expected(model, q, x[:2], num_samples=3), 1e-6)


@needs_onnx
def test_a_mean_is_exported(tmp_path):
    model, x = seeded(mlp, torch.float32), vectors(5).float()
    q = PointMass.from_model(model)
    for unroll in (None, True):
        Predictor(model, q).to_onnx(tmp_path / "p.onnx", x, unroll=unroll)
        assert_same(run_onnx(tmp_path / "p.onnx", input=x), expected(model, q, x), 1e-6)


@needs_onnx
@pytest.mark.parametrize("unroll", [None, True])
def test_an_onnx_file_has_points_once(unroll, tmp_path):
    """A large layer that is not sampled, and a small one that is."""
    model = seeded(lambda: nn.Sequential(nn.Linear(D, 30_000), nn.ReLU(), nn.Linear(30_000, K)), torch.float32)
    model[0].requires_grad_(False)
    q = DiagonalGaussian.from_model(model, {model[2].bias: torch.full((K,), 0.5)})
    x = vectors(5).float()
    Predictor(model, q, num_samples=20).to_onnx(tmp_path / "p.onnx", x, unroll=unroll)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert os.path.getsize(tmp_path / "p.onnx") < 1.5 * weights
    assert_same(run_onnx(tmp_path / "p.onnx", input=x), expected(model, q, x, num_samples=20), 1e-6)


DEPLOYED = """
import sys
sys.modules["bsam"] = None  # as if it were not installed
import numpy as np
x = np.load("x.npy")
if sys.argv[1] == "onnx":
    sys.modules["torch"] = None
    import onnxruntime
    session = onnxruntime.InferenceSession("p.onnx")
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"input": x})))
else:
    import torch
    found = torch.export.load("p.pt2").module()(torch.from_numpy(x))
np.savez(f"{sys.argv[1]}.npz", **{name: np.asarray(value) for name, value in found.items()})
"""


@needs_onnx
def test_a_process_with_neither_bsam_nor_the_model(tmp_path):
    found, x, wanted = exportable("BatchNorm")
    found.to_onnx(tmp_path / "p.onnx", x)
    torch.export.save(found.export(x), tmp_path / "p.pt2")
    np.save(tmp_path / "x.npy", x[:4].numpy())
    for how in ("onnx", "torch"):
        command = [sys.executable, "-c", DEPLOYED, how]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / f"{how}.npz") as numbers:
            assert_same(dict(numbers), wanted(x[:4]), 1e-6)


@needs_onnx
def test_what_cannot_be_exported(tmp_path, monkeypatch, capfd):
    model, x = seeded(Branching, torch.float32), vectors(5).float()
    found = Predictor(model, gaussian(model), num_samples=2)
    (tmp_path / "p.onnx").write_text("earlier")
    for attempt in (lambda: found.export(x), lambda: found.to_onnx(tmp_path / "p.onnx", x)):
        with pytest.raises(RuntimeError, match=r"stacked: .*; unrolled: .*Python code that depends on the values"):
            attempt()
    assert not capfd.readouterr().err  # the error says it
    with pytest.raises(ValueError, match=r"inputs has one example.*give two or more"):
        found.export(x[:1])
    good = Predictor(seeded(mlp, torch.float32), gaussian(seeded(mlp)), num_samples=2)
    with pytest.raises(TypeError, match="input is of type list: the inputs of an ONNX file are tensors"):
        good.to_onnx(tmp_path / "p.onnx", ([x],))
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_MOST_ONNX_BYTES", 100)
        with pytest.raises(ValueError, match="an ONNX file holds less than 2 GiB: use fewer samples"):
            good.to_onnx(tmp_path / "p.onnx", x)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_OLDEST_FOR_ONNX", "99")
        with pytest.raises(RuntimeError, match=r"needs torch 99 or newer, and this is torch .*export\(inputs\)"):
            good.to_onnx(tmp_path / "p.onnx", x)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(ImportError, match=r"onnxscript, which is missing\. .* pip install '\.\[export\]'$"):
            good.to_onnx(tmp_path / "p.onnx", x)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        good.to_onnx(tmp_path / "no" / "p.onnx", x)
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_compare", fail_in_onnx)
        with pytest.raises(RuntimeError, match="ONNX Runtime gives other numbers"):
            good.to_onnx(tmp_path / "p.onnx", x)
    assert os.listdir(tmp_path) == ["p.onnx"]
    assert (tmp_path / "p.onnx").read_text() == "earlier"


compare = exporting._compare


def fail_in_onnx(where, expected, found):
    if where == "ONNX Runtime":
        compare(where, expected, {name: tensor + 1 for name, tensor in found.items()})


def test_exported_numbers_are_compared():
    exporting._compare("here", {"a": torch.tensor([math.nan, 2.0])}, {"a": torch.tensor([math.nan, 2.0])})
    with pytest.raises(RuntimeError, match=r"here gives other numbers: a differs by 0\.5"):
        exporting._compare("here", {"a": torch.tensor([2.0])}, {"a": torch.tensor([2.5])})


def test_fixed_shapes(tmp_path):
    """A model that reads the number of examples is exported for that number."""

    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x) if len(x) == 5 else super().forward(2 * x)

    model, x = seeded(lambda: Fixed(D, K), torch.float32), vectors(5).float()
    found = Predictor(model, gaussian(model), num_samples=2)
    with pytest.raises(RuntimeError, match="write dynamic_shapes=None"):
        found.export(x)
    assert_same(found.export(x, dynamic_shapes=None).module()(x), found(x), 1e-6)


def test_a_limited_number_of_examples():
    """PyTorch's BatchNorm on CUDA asks whether there are more than 65,535 examples; here a network asks for seven."""

    class Limited(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.shape[0] <= 7 else super().forward(2 * x)

    model, x = seeded(lambda: Limited(D, K), torch.float32), vectors(8).float()
    found = Predictor(model, gaussian(model), num_samples=2)
    program = found.export(x[:5]).module()
    for n in (7, 1):
        assert_same(program(x[:n]), found(x[:n]), 1e-6)
    with pytest.raises((AssertionError, RuntimeError), match="7"):
        program(x)
