"""Checkpoints of Lightning around steps in two halves, and the posterior beside each."""

import datetime
import os

import pytest

pytest.importorskip("lightning")

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import bsam
from bsam.integrations.lightning_callbacks import PosteriorCheckpoint
from tests.integrations.test_lightning import Automatic, Module, assert_equal, batches, fit, loader, plain, trainer
from tests.optimizers import make

pytestmark = [pytest.mark.integrations]


def test_the_posterior_is_saved_and_removed_with_the_checkpoint(tmp_path):
    module = Module(options={"betas": (0.9, 0.5)})
    checkpoints = PosteriorCheckpoint(tmp_path, filename="{epoch}", save_last=True, monitor="loss_epoch", save_top_k=1)
    found = fit(module, tmp_path, max_epochs=3, enable_checkpointing=True, callbacks=[checkpoints])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert {os.path.splitext(name)[0] for name in names if name.endswith(".ckpt")} == {
        os.path.splitext(name)[0] for name in names if name.endswith(".safetensors")
    }
    saved = bsam.load_posterior(tmp_path / "last.safetensors")
    expected = found.optimizers[0].posterior(module)
    for name, mean in expected.mean.items():
        assert torch.equal(saved.mean[name], mean)
    fresh = Module()
    saved.write_mean(fresh)
    assert_equal(fresh.network, module.network)


def test_a_link_to_the_last_checkpoint_has_a_posterior(tmp_path):
    module = Module(options={"betas": (0.9, 0.5)})
    fit(module, tmp_path, enable_checkpointing=True, callbacks=[PosteriorCheckpoint(tmp_path, save_last="link")])
    last = bsam.load_posterior(tmp_path / "last.safetensors")
    for name, weights in module.named_parameters():
        assert torch.equal(last.mean[name], weights)


def test_a_posterior_beside_averaged_weights_is_refused(tmp_path):
    averaging = pytest.importorskip("lightning.pytorch.callbacks").EMAWeightAveraging(decay=0.5)
    with pytest.raises(ValueError, match="averaged weights"):
        fit(Module(), tmp_path, enable_checkpointing=True, callbacks=[PosteriorCheckpoint(tmp_path), averaging])


# ---------------------------------------------------------------- between two micro-batches


def test_a_stop_between_micro_batches_can_be_saved(tmp_path):
    class Stopping(Module):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = batch_idx == 2

    module = Stopping(accumulate_grad_batches=2)
    found = fit(module, tmp_path)
    found.save_checkpoint(tmp_path / "stopped.ckpt")
    assert found.global_step == 1


class Stopped(Module):
    """Is stopped between two micro-batches. It does not call `on_train_epoch_end` of its base class."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = batch_idx == 2

    def on_train_epoch_end(self):
        pass


def test_the_checkpoint_after_a_stop_has_the_weights_of_the_last_step(tmp_path):
    module = Stopped("SAM-Adam", accumulate_grad_batches=2)
    fit(module, tmp_path, enable_checkpointing=True, callbacks=[PosteriorCheckpoint(tmp_path, filename="stopped")])
    saved = bsam.load_posterior(tmp_path / "stopped.safetensors")
    assert all(torch.equal(saved.mean[name], weights) for name, weights in module.named_parameters())
    assert (tmp_path / "stopped.ckpt").exists()


class Failing(Module):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint")
@pytest.mark.parametrize(
    "checkpoint", [OnExceptionCheckpoint, lambda path: ModelCheckpoint(path, save_on_exception=True)]
)
def test_a_failure_between_micro_batches_is_saved(checkpoint, tmp_path):
    with pytest.raises(ZeroDivisionError):
        fit(Failing(accumulate_grad_batches=2), tmp_path, enable_checkpointing=True, callbacks=[checkpoint(tmp_path)])
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


class Resumable(DataLoader):
    """Continues after the batch at which its state was taken."""

    position = 0

    def __iter__(self):
        for i, batch in list(enumerate(super().__iter__()))[self.position :]:
            self.position = i + 1
            yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization", "ignore:The dirpath has changed")
def test_a_run_resumed_inside_an_epoch_equals_one_without_interruption(tmp_path):
    """And the first micro-batch after a checkpoint is not saved again."""

    def checkpoints(folder):
        return ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    modules = [Module(accumulate_grad_batches=4, gradient_clip_val=0.5) for _ in range(2)]
    found = trainer(tmp_path, enable_checkpointing=True, callbacks=[checkpoints("whole")])
    found.fit(modules[0], Resumable(batches(), batch_size=None))
    found = trainer(tmp_path, enable_checkpointing=True, callbacks=[checkpoints("resumed")])
    half = tmp_path / "whole" / "step=1.ckpt"
    found.fit(modules[1], Resumable(batches(), batch_size=None), ckpt_path=half, weights_only=False)
    assert_equal(modules[1].network, modules[0].network)
    assert os.listdir(tmp_path / "resumed") == ["step=2.ckpt"]


def test_saving_between_micro_batches_says_what_to_do(tmp_path):
    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            self.log("validation", F.cross_entropy(self.network(batch[0]), batch[1]))

    found = trainer(tmp_path, val_check_interval=3, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path)])
    with pytest.raises(RuntimeError, match="make both intervals multiples of the number of micro-batches"):
        found.fit(Validated(accumulate_grad_batches=2), loader(), loader())


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["optimizer_step", "configure_gradient_clipping", "backward", "on_after_backward"])
def test_methods_that_would_not_be_called_are_refused(name, tmp_path):
    kind = type("Own", (Module,), {name: lambda self, *args, **options: None})
    with pytest.raises(ValueError, match=rf"Own\.{name}\(\) would not be called.*on_before_optimizer_step"):
        fit(kind(), tmp_path)

    def hook(self, *args, **options):
        return getattr(lightning.LightningModule, name)(self, *args, **options)

    fit(type("Own", (Automatic,), {name: hook})(), tmp_path)  # where they are called, they are not refused


@pytest.mark.parametrize("in_a_dictionary", [False, True])
def test_a_scheduler_that_would_not_be_stepped_is_refused(in_a_dictionary, tmp_path):
    class Reduced(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = ReduceLROnPlateau(optimizer)
            if in_a_dictionary:
                return [optimizer], [{"scheduler": scheduler, "monitor": "loss_epoch"}]
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "loss_epoch"}

    with pytest.raises(ValueError, match=r"write in on_train_epoch_end\(\).*callback_metrics\['loss_epoch'\]"):
        fit(Reduced(), tmp_path)

    class Stepped(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)]

        def on_train_epoch_end(self):
            self.lr_schedulers().step(self.trainer.callback_metrics["loss_epoch"])

    found = fit(Stepped(), tmp_path, max_epochs=3)
    assert found.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.3 / 8)


def test_callbacks_of_the_module_belong_to_those_of_its_base_class(tmp_path):
    class Own(Module):
        def configure_callbacks(self):
            return []

    with pytest.raises(ValueError, match=r"\[\*super\(\)\.configure_callbacks\(\), \.\.\.\]"):
        fit(Own(), tmp_path)


def test_a_learning_rate_is_found(tmp_path):
    """The search takes all callbacks away while it trains, and restores the weights."""

    class Searched(Module):
        lr = 1e-3

        def configure_optimizers(self):
            return make("BSAM", self.network.parameters(), lr=self.lr)

    module = Searched()
    found = trainer(tmp_path, max_epochs=4, callbacks=[LearningRateFinder(num_training_steps=20)])
    found.fit(module, loader())
    assert module.lr == found.optimizers[0].param_groups[0]["lr"] != 1e-3
    expected, _, _ = plain("BSAM", [[batch] for batch in 4 * batches()], lr=module.lr)
    assert_equal(module.network, expected)


def test_saving_by_time_is_refused(tmp_path):
    by_time = ModelCheckpoint(tmp_path, train_time_interval=datetime.timedelta(seconds=1))
    with pytest.raises(ValueError, match="write every_n_train_steps="):
        fit(Module(), tmp_path, enable_checkpointing=True, callbacks=[by_time])
