"""Training by Lightning's Trainer equals the plain loop."""

import copy
import dataclasses
import math
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from bsam.integrations.lightning import LightningModule
from tests.optimizers import METHODS, make

pytestmark = [pytest.mark.integrations]

BATCHES = 6
SIZE = 8
CUT = 3
"""The first of two ranks has so many examples of a batch, the second has the others."""


def batches():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCHES * SIZE, 4, generator=generator, dtype=torch.float64)
    return [(x[i : i + SIZE], (x[i : i + SIZE, 0] > 0).long()) for i in range(0, len(x), SIZE)]


def loader(dtype=torch.float64):
    return DataLoader([(x.to(dtype), y) for x, y in batches()], batch_size=None)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def optimizer_of(kind, model, **options):
    # The gradients of examples are computed in a loop: the training step below logs, which is not possible under vmap.
    per_example = {"module": model, "vectorise": False} if METHODS[kind].per_example else {}
    return make(kind, model.parameters(), **per_example, **options)


class Training:
    """What a user writes, for either base class."""

    def __init__(self, kind="BSAM", scheduler=None, options=None, **arguments):
        super().__init__(**arguments)
        self.network = network()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.kind, self.scheduler, self.options, self.calls = kind, scheduler, options or {}, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.network(x)
        loss = F.cross_entropy(outputs.double(), y)
        self.calls.append(loss.detach())
        self.accuracy(outputs, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = optimizer_of(self.kind, self.network, **self.options)
        if self.scheduler is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, **self.scheduler}]


class Module(Training, LightningModule):
    pass


class Automatic(Training, lightning.LightningModule):
    pass


class Losses(Callback):
    """Keeps what callbacks see of each batch."""

    def __init__(self):
        self.steps, self.logged, self.norms = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics["loss_step"]))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(float(torch.stack([p.grad.norm() for p in pl_module.parameters()]).norm()))


def trainer(folder, **arguments):
    given = {"max_epochs": 1, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1, **arguments}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lightning.Trainer(default_root_dir=folder, **quiet, **given)


def fit(module, folder, **arguments):
    found = trainer(folder, **arguments)
    found.fit(module, loader())
    return found


def plain(kind, steps, **options):
    """The plain loop over lists of micro-batches; return network, optimizer and losses."""
    model = network()
    optimizer = optimizer_of(kind, model, **options)

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]).double(), batch[1])

    losses = []
    for step in steps:
        losses += [float(optimizer.probe(loss_fn, batch)) for batch in step]
        optimizer.step()
    return model, optimizer, losses


def assert_equal(network, expected):
    for (name, one), other in zip(network.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", METHODS)
def test_the_trainer_is_the_plain_loop(kind, tmp_path):
    module, seen = Module(kind), Losses()
    found = fit(module, tmp_path, callbacks=[seen])
    expected, _, losses = plain(kind, [[batch] for batch in batches()])
    assert_equal(module.network, expected)
    assert seen.steps == pytest.approx(losses, rel=1e-12)
    assert found.global_step == BATCHES
    assert "step" not in vars(found.optimizers[0])


@pytest.mark.parametrize("splits", [1, 2])
def test_logs_and_metrics_see_the_first_pass_only(splits, tmp_path):
    module, seen = Module(options={"splits": splits}), Losses()
    found = fit(module, tmp_path, callbacks=[seen])
    first = [float(loss) for loss in module.calls[::2]]  # of each part, its first and its second pass
    assert len(module.calls) == 2 * splits * BATCHES
    assert found.callback_metrics["loss_epoch"] == pytest.approx(sum(first) / len(first))
    if splits == 1:
        assert seen.logged == pytest.approx(first)
        assert seen.logged == seen.steps
    assert module.accuracy._update_count in (0, splits * BATCHES)  # Lightning resets it after the epoch


def test_metrics_count_every_example_once(tmp_path):
    counted, found = [], []

    class Counting(Module):
        def __init__(self):
            super().__init__()
            options = {"task": "multiclass", "num_classes": 2, "average": "macro"}
            self.several = torchmetrics.MetricCollection(  # the first two share their counts
                {"recall": torchmetrics.Recall(**options), "precision": torchmetrics.Precision(**options)}
                | {"outputs": torchmetrics.CatMetric()}
            )

        def training_step(self, batch, batch_idx):
            outputs = self.network(batch[0])
            if self.first_pass:
                found.append((outputs.detach(), batch[1]))
            self.several["outputs"].update(outputs)
            for name in ("recall", "precision"):
                self.several[name].update(outputs, batch[1])
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            counted.append(int(sum(self.accuracy.tp + self.accuracy.fn)))

    module = Counting()
    fit(module, tmp_path)
    assert counted == [SIZE * (i + 1) for i in range(BATCHES)]
    outputs, labels = (torch.cat(each) for each in zip(*found, strict=True))
    results = module.several.compute()
    torch.testing.assert_close(results["outputs"], outputs.float())
    for name in ("Recall", "Precision"):
        expected = getattr(torchmetrics, name)(task="multiclass", num_classes=2, average="macro")(outputs, labels)
        torch.testing.assert_close(results[name.lower()], expected)


@pytest.mark.parametrize(("accumulate", "num_steps"), [(2, 3), (4, 2)])
def test_accumulation_is_the_plain_loop(accumulate, num_steps, tmp_path):
    module = Module(accumulate_grad_batches=accumulate)
    found = fit(module, tmp_path)
    given = batches()
    expected, _, _ = plain("BSAM", [given[i : i + accumulate] for i in range(0, BATCHES, accumulate)])
    assert_equal(module.network, expected)  # the last batch of the epoch steps
    assert found.global_step == num_steps


def test_clipping_is_that_of_the_optimizer(tmp_path):
    module, seen = Module(gradient_clip_val=0.01, accumulate_grad_batches=2), Losses()
    fit(module, tmp_path, callbacks=[seen])
    given = batches()
    expected, _, _ = plain("BSAM", [given[i : i + 2] for i in range(0, BATCHES, 2)], max_grad_norm=0.01)
    for one, other in zip(module.network.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # torch adds 1e-6 to the norm
    assert len(seen.norms) == 3  # the hook sees the gradient before it is clipped, as in automatic optimization
    assert min(seen.norms) > 0.01


def test_clipping_by_value(tmp_path):
    clipped = []

    class Clipped(Module):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            clipped.append(max(float(p.grad.abs().max()) for p in self.network.parameters()))

    fit(Clipped(gradient_clip_val=1e-3, gradient_clip_algorithm="value"), tmp_path)
    assert clipped == pytest.approx([1e-3] * BATCHES)


def test_precision_bfloat16(tmp_path):
    module = Module(gradient_clip_val=10.0)
    module.network.float()
    found = trainer(tmp_path, precision="bf16-mixed")
    found.fit(module, loader(torch.float32))
    model = network().float()
    optimizer = make("BSAM", model.parameters())
    for x, y in batches():
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.step(lambda x, y: F.cross_entropy(model(x).double(), y), x.float(), y)
    assert_equal(module.network, model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_precision_float16_on_a_gpu(tmp_path):
    module = Module(gradient_clip_val=0.5, accumulate_grad_batches=2)
    module.network.float()
    found = trainer(tmp_path, accelerator="gpu", precision="16-mixed")
    found.fit(module, loader(torch.float32))
    model, scaler = network().float().cuda(), torch.amp.GradScaler("cuda")
    optimizer = make("BSAM", model.parameters())

    def loss_fn(x, y):
        with torch.autocast("cuda", torch.float16):
            return F.cross_entropy(model(x).double(), y)

    for i, (x, y) in enumerate(batches()):
        optimizer.probe(loss_fn, x.float().cuda(), y.cuda(), scaler=scaler)
        if i % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert found.precision_plugin.scaler.get_scale() == scaler.get_scale()
    assert found.optimizers[0].skipped_steps == optimizer.skipped_steps
    for one, other in zip(module.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(next(module.network.parameters()).cpu(), next(network().float().parameters()))


@pytest.mark.parametrize("overflow", [1, 2])
def test_precision_float16_skips_an_overflow_in_one_gradient(overflow, tmp_path):
    """In the third step, in its first pass or in its second."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def overflowing(loss, number):
        if number == 4 + overflow:
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss

    class Overflowing(Module):
        num_passes = 0

        def training_step(self, batch, batch_idx):
            self.num_passes += 1
            return overflowing(super().training_step(batch, batch_idx), self.num_passes)

    module = Overflowing(gradient_clip_val=10.0)
    module.network.float()
    found = trainer(tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    found.fit(module, loader(torch.float32))
    expected, own = network().float(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = make("BSAM", expected.parameters())
    num_passes = 0

    def loss_fn(x, y):
        nonlocal num_passes
        num_passes += 1
        with torch.autocast("cpu", torch.float16):
            return overflowing(F.cross_entropy(expected(x).double(), y), num_passes)

    for x, y in batches():
        optimizer.probe(loss_fn, x.float(), y, scaler=own)
        own.unscale_(optimizer)
        nn.utils.clip_grad_norm_(expected.parameters(), 10.0)
        own.step(optimizer)
        own.update()
    assert_equal(module.network, expected)
    assert scaler.get_scale() == own.get_scale() == 2.0**9
    assert found.optimizers[0].skipped_steps == 1


def test_max_steps_counts_steps(tmp_path):
    module = Module(accumulate_grad_batches=2)
    found = fit(module, tmp_path, max_steps=5, max_epochs=-1)
    assert found.global_step == 5
    assert found.optimizers[0].state[next(module.network.parameters())]["step"] == 5


@pytest.mark.parametrize(("interval", "num_halvings"), [("step", 6), ("epoch", 2)])
def test_schedulers_step(interval, num_halvings, tmp_path):
    module = Module(scheduler={"interval": interval}, accumulate_grad_batches=2)
    found = fit(module, tmp_path, max_epochs=2)
    assert found.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3 * 0.5**num_halvings)


@pytest.mark.parametrize(("interval", "frequency"), [("step", 4), ("epoch", 2)])
def test_schedulers_step_as_in_automatic_optimization(interval, frequency, tmp_path):
    rates = {}
    for kind in (Module, Automatic):

        class Watched(kind):
            def on_train_batch_end(self, outputs, batch, batch_idx):
                rates.setdefault(type(self).__base__, []).append(self.trainer.optimizers[0].param_groups[0]["lr"])

        fit(Watched(scheduler={"interval": interval, "frequency": frequency}), tmp_path, max_epochs=3)
    assert rates[Module] == rates[Automatic]
    assert len(set(rates[Module])) > 1


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_schedule_over_the_estimated_steps_reaches_its_end(accumulate, tmp_path):
    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = optimizer_of("BSAM", self.network)
            self.estimated = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.estimated)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Scheduled(accumulate_grad_batches=accumulate)
    found = fit(module, tmp_path, max_epochs=2)
    assert module.estimated == found.global_step == 2 * math.ceil(BATCHES / accumulate)
    assert found.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    assert found.accumulate_grad_batches == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_log_of_parts_is_the_mean_over_the_examples(several, tmp_path):
    """Batches of 5 examples in parts of 3 and 2, and one batch of 3 in parts of 2 and 1."""
    seen = []

    class Logging(Module):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            if self.first_pass:
                seen.append((float(loss.detach()), len(batch[1])))
            if several:
                self.log_dict({"loss": loss}, on_step=False, on_epoch=True)
            else:
                self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

    x = torch.cat([x for x, _ in batches()])[:13]
    data = DataLoader([(x[i : i + 5], (x[i : i + 5, 0] > 0).long()) for i in (0, 5, 10)], batch_size=None)
    found = trainer(tmp_path)
    found.fit(Logging(options={"splits": 2}), data)
    assert [size for _, size in seen] == [3, 2, 3, 2, 2, 1]
    expected = sum(loss * size for loss, size in seen) / 13
    assert float(found.callback_metrics["loss"]) == pytest.approx(expected, rel=1e-6)


def test_averaged_weights_stay_while_statistics_are_averaged(tmp_path):
    """After the last epoch, Lightning runs one more without steps, for the statistics of BatchNorm."""

    class Averaged(Module):
        def on_train_epoch_start(self):
            self.last = [p.detach().clone() for p in self.network.parameters()]

    module = Averaged()
    module.network.insert(1, nn.BatchNorm1d(5).double())
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
    fit(module, tmp_path, max_epochs=2, callbacks=[averaging])
    for average, weights in zip(module.last, module.network.parameters(), strict=True):
        assert torch.equal(average, weights)


@pytest.mark.parametrize("kind", ["BSAM", "SAM-Adam"])
def test_a_resumed_run_equals_one_without_interruption(kind, tmp_path):
    options = {"scheduler": {"interval": "step"}, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    whole = Module(kind, **options)
    expected = fit(whole, tmp_path, max_epochs=4).optimizers[0].state_dict()

    fit(Module(kind, **options), tmp_path, max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(77)
    resumed = Module(kind, **options)
    found = trainer(tmp_path, max_epochs=4)
    found.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert_equal(resumed.network, whole.network)
    state = found.optimizers[0].state_dict()
    torch.testing.assert_close(state["state"], expected["state"], rtol=0, atol=0)
    assert state["param_groups"] == expected["param_groups"]
    assert found.global_step == 12


def test_validation_between_micro_batches_keeps_the_probes(tmp_path):
    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            self.log("validation", F.cross_entropy(self.network(batch[0]), batch[1]))

    module = Validated(accumulate_grad_batches=2)
    trainer(tmp_path, val_check_interval=3).fit(module, loader(), loader())
    given = batches()
    expected, _, _ = plain("BSAM", [given[i : i + 2] for i in range(0, BATCHES, 2)])
    assert_equal(module.network, expected)


def test_a_training_step_may_return_a_dictionary_and_extend_another(tmp_path):
    outputs = []

    class Extended(Module):
        def training_step(self, batch):
            return {"loss": super().training_step(batch, 0), "size": len(batch[0])}

        def on_train_batch_end(self, output, batch, batch_idx):
            outputs.append(output)

    module = Extended()
    fit(module, tmp_path)
    expected, _, losses = plain("BSAM", [[batch] for batch in batches()])
    assert_equal(module.network, expected)
    assert [float(output["loss"]) for output in outputs] == pytest.approx(losses)
    assert {output["size"] for output in outputs} == {SIZE}


def test_weights_of_micro_batches(tmp_path):
    class Weighted(Module):
        def probe_weight(self, batch):
            return float(1 + batch[1].sum())

    module = Weighted(accumulate_grad_batches=2)
    fit(module, tmp_path)
    model = network()
    optimizer = make("BSAM", model.parameters())
    for i, batch in enumerate(batches()):
        weight = float(1 + batch[1].sum())
        optimizer.probe(lambda x, y: F.cross_entropy(model(x), y), *batch, weight=weight)
        if i % 2:
            optimizer.step()
    assert_equal(module.network, model)


@dataclasses.dataclass
class Graph:
    """A batch of a type of its own."""

    x: torch.Tensor
    y: torch.Tensor


class OfGraphs(LightningModule):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.network = network()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch.x), batch.y)

    def configure_optimizers(self):
        return make("BSAM", self.network.parameters())


def test_examples_that_cannot_be_counted(tmp_path):
    graphs = [Graph(x[:4] if i % 2 else x, y[:4] if i % 2 else y) for i, (x, y) in enumerate(batches())]
    module = OfGraphs()
    trainer(tmp_path).fit(module, DataLoader(graphs, batch_size=None))
    assert_equal(module.network, plain("BSAM", [[(graph.x, graph.y)] for graph in graphs])[0])
    with pytest.raises(ValueError, match=r"of type Graph.* override probe_weight\(batch\) in OfGraphs"):
        trainer(tmp_path).fit(OfGraphs(accumulate_grad_batches=2), DataLoader(graphs, batch_size=None))

    class Counted(OfGraphs):
        def probe_weight(self, batch):
            return len(batch.y)

    module = Counted(accumulate_grad_batches=2)
    trainer(tmp_path).fit(module, DataLoader(graphs, batch_size=None))
    steps = [[(graph.x, graph.y) for graph in graphs[i : i + 2]] for i in range(0, BATCHES, 2)]
    assert_equal(module.network, plain("BSAM", steps)[0])


def test_tensors_of_different_lengths(tmp_path):
    """From two loaders, for example."""

    class Joined(Silent):
        def training_step(self, batch, batch_idx):
            return sum(F.cross_entropy(self.network(x), y) for x, y in batch)

        def probe_weight(self, batch):
            return len(batch[0][1])

    pairs = [((x, y), (x[:3], y[:3])) for x, y in batches()]
    module, model = Joined(), network()
    trainer(tmp_path).fit(module, DataLoader(pairs, batch_size=None))
    optimizer = make("BSAM", model.parameters())
    for pair in pairs:
        optimizer.step(lambda: sum(F.cross_entropy(model(x), y) for x, y in pair))  # noqa: B023
    assert_equal(module.network, model)


def together(module, vectorise=True):
    """Let the optimizer of a module compute two splits under vmap."""
    module.options |= {"splits": 2, "module": module.network, "vectorise": vectorise}
    return module


class Silent(LightningModule):
    """Has no metrics, and logs nothing."""

    def __init__(self):
        super().__init__()
        self.network, self.options = network(), {}

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return make("BSAM", self.network.parameters(), **self.options)


def test_splits_that_log_are_computed_in_a_loop(tmp_path):
    with pytest.raises(RuntimeError, match="vectorise=False"):
        fit(together(Module()), tmp_path)

    class Logging(Silent):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    class Returning(Silent):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx)}

    for kind in (Logging, Returning):
        with pytest.raises(RuntimeError, match="vectorise=False"):
            fit(together(kind()), tmp_path)


def test_splits_that_do_not_log_are_computed_together(tmp_path):
    modules = [together(Silent(), vectorise) for vectorise in (True, False)]
    for module in modules:
        fit(module, tmp_path)
    for one, other in zip(*(module.network.parameters() for module in modules), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- automatic optimization


def test_automatic_optimization_steps_as_the_plain_loop(tmp_path):
    module = Automatic()
    fit(module, tmp_path)
    assert_equal(module.network, plain("BSAM", [[batch] for batch in batches()])[0])
    module = Module()
    module.automatic_optimization = True
    fit(module, tmp_path)
    assert_equal(module.network, plain("BSAM", [[batch] for batch in batches()])[0])


def test_automatic_accumulation_is_refused(tmp_path):
    module = Automatic()
    before = copy.deepcopy(module.network)
    with pytest.raises(RuntimeError, match=r"bsam\.integrations"):
        fit(module, tmp_path, accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match=r"divides the loss by 2.*bsam\.integrations"):
        fit(module, tmp_path, accumulate_grad_batches=2, limit_train_batches=1)  # it accumulates nothing
    assert_equal(module.network, before)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_automatic_clipping_is_refused(algorithm, tmp_path):
    module = Automatic()
    before = copy.deepcopy(module.network)
    with pytest.raises(RuntimeError, match=r"by clipping.*max_grad_norm=.*bsam\.integrations"):
        fit(module, tmp_path, gradient_clip_val=100.0, gradient_clip_algorithm=algorithm)
    assert_equal(module.network, before)


def test_automatic_optimization_with_a_scaler_is_refused(tmp_path):
    module = Automatic()
    module.network.float()
    found = trainer(tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))])
    with pytest.raises((RuntimeError, ValueError), match="probe"):
        found.fit(module, loader(torch.float32))


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("given", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}])
def test_arguments_of_the_trainer_that_act_on_each_pass_are_refused(given, automatic, tmp_path):
    module = Module()
    module.automatic_optimization = automatic
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=rf"super\(\)\.__init__\({name}={value}\)"):
        fit(module, tmp_path, **given)


def test_another_optimizer_is_refused(tmp_path):
    class Other(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.network.parameters(), lr=0.1)

    with pytest.raises(TypeError, match="automatic_optimization = True"):
        fit(Other(), tmp_path)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`")
def test_a_step_that_draws_its_own_batch_is_refused(tmp_path):
    class Drawing(Module):
        def training_step(self, dataloader_iter):
            return super().training_step(next(dataloader_iter)[0], 0)

    with pytest.raises(TypeError, match="the batch is an iterator"):
        fit(Drawing(), tmp_path)


@pytest.mark.parametrize(
    "given", [{"accumulate_grad_batches": 0}, {"gradient_clip_algorithm": "sum"}, {"gradient_clip_val": -1.0}]
)
def test_arguments_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match="{}={!r}".format(*next(iter(given.items())))):
        Module(**given)


def test_a_module_can_be_pickled_and_copied():
    module = pickle.loads(pickle.dumps(Module(gradient_clip_val=0.5)))
    assert_equal(copy.deepcopy(module).network, module.network)


def test_without_a_trainer_a_training_step_is_a_function():
    module = Module()
    module.log = lambda *args, **options: None
    assert module.training_step(batches()[0], 0).requires_grad


# ---------------------------------------------------------------- two processes


def test_two_processes_are_the_plain_loop(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.integrations.ranks", str(tmp_path)]
    subprocess.run(command, check=True, timeout=900, env=environment, cwd=Path(__file__).parents[2])
    steps = [batches()[i : i + 2] for i in range(0, BATCHES, 2)]
    parts = [[(x[h], y[h]) for x, y in step for h in (slice(CUT), slice(CUT, None))] for step in steps]
    expected_of = {"ddp": steps, "fabric": steps, "group": parts, "fabric-group": parts}  # in a group ranks are splits
    for name, micro_batches in expected_of.items():
        expected, _, _ = plain("BSAM", micro_batches)
        for rank in (0, 1):
            saved = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            for key, weights in expected.state_dict().items():
                torch.testing.assert_close(saved[key], weights, rtol=1e-12, atol=1e-12, msg=f"{name} {rank} {key}")
