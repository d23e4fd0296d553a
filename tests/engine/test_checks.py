"""What runs of one `TrainStep` must have in common, and what may not change between steps."""

import pytest
import torch

from bsam.engine import checks
from tests.engine.runs import Run, refuses, stack, stacked
from tests.networks import make_batch


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: Run("BSAM", curvature="abs_mean"),
            "the runs differ in curvature: mean_abs and abs_mean. Runs that are",
        ),
        (lambda: Run("SAM-SGD"), "must have optimizers of one class"),
        (lambda: Run("BSAM", "partly frozen"), "the model of run 1 differs from the model of run 0"),
        (lambda: Run("BSAM", "convolutional"), "the model of run 1 differs from the model of run 0"),
    ],
)
def test_runs_must_be_alike(other, message):
    runs = [Run("BSAM"), other()]
    refuses(runs, lambda: stacked(runs, [make_batch("mlp", 16)] * 2), ValueError, message)


def test_every_run_must_have_its_own_loss():
    runs = [Run("BSAM", seed=seed) for seed in (0, 1)]
    runs[1].loss_fn = runs[0].loss_fn
    make = lambda: stacked(runs, [make_batch("mlp", 16)] * 2)  # noqa: E731
    refuses(runs, make, ValueError, "no gradient reaches any parameter of the optimizer of run 1")


def test_a_batch_must_have_a_row_for_each_run():
    runs = [Run("BSAM", seed=seed) for seed in (0, 1)]
    batch = make_batch("mlp", 16)
    message = r"a tensor of the batch has shape \(3, 16, 12\): with 2 runs it must be \(2, examples, ...\)"
    refuses(runs, lambda: stacked(runs, [batch] * 3), ValueError, message)
    step = stacked(runs, [batch] * 2)
    refuses(runs, lambda: step(*stack([batch] * 3)), ValueError, message)


@pytest.mark.parametrize("change", [{"num_data": 200}, {"seed": 4}, {"perturb": False}, {"splits": 2}])
def test_what_is_compiled_in_may_not_change(change):
    run = Run("BSAM")
    batch = make_batch("mlp", 16)
    step = run.engine(batch)
    step(*batch)
    ((option, value),) = change.items()
    run.optimizer.param_groups[0][option] = value
    refuses([run], lambda: step(*batch), ValueError, f"{option} was .* when the TrainStep was made, and is {value} now")


def test_groups_may_not_be_added():
    run = Run("BSAM", params=lambda model: model[0].parameters())
    batch = make_batch("mlp", 16)
    step = run.engine(batch)
    run.optimizer.add_param_group({"params": list(run.model[2].parameters())})
    refuses([run], lambda: step(*batch), ValueError, "a group of parameters was added after the TrainStep was made")


def test_runs_may_differ_in_seeds_and_rates():
    optimizers = [Run("BSAM", seed=seed, lr=lr).optimizer for seed, lr in ((0, 0.1), (1, 0.2))]
    checks.alike(optimizers)
    checks.unchanged(checks.fixed_options(optimizers), optimizers)
    optimizers[0].param_groups[0]["lr"] = 0.3
    fixed = checks.fixed_options(optimizers)
    assert not any("lr" in group for group in fixed)
    optimizers[1].param_groups[0]["seed"] = 5  # compiled in, as the noise is
    with pytest.raises(ValueError, match="seed was 1 when the TrainStep was made, and is 5 now"):
        checks.unchanged(fixed, optimizers)


def test_one_architecture_means_names_shapes_buffers_and_modes():
    runs = [Run("BSAM", "normalised", seed=seed) for seed in (0, 1)]

    def check(**changed):
        keys = changed.get("keys", [["a"], ["a"]])
        slots = [run.optimizer._slots() for run in runs]
        checks.one_architecture([run.model for run in runs], keys, slots)

    check()
    with pytest.raises(ValueError, match="the model of run 1 differs"):
        check(keys=[["a"], ["b"]])
    runs[1].model[1].eval()
    with pytest.raises(ValueError, match=r"the same modes \(train\(\) or eval\(\)\)"):
        check()


def test_all_losses_must_use_the_same_parameters():
    runs = [Run("BSAM", seed=seed) for seed in (0, 1)]
    models, slots = [run.model for run in runs], [run.optimizer._slots() for run in runs]
    x = torch.ones(2, 12, dtype=torch.float64)
    first, both = lambda x: runs[0].model[0](x).sum(), lambda x: runs[1].model(x).sum()
    assert checks.reached(models[:1], slots[:1], [first], (x,)) == [True, True, False, False]
    with pytest.raises(ValueError, match="the loss of run 1 uses other parameters than the loss of run 0"):
        checks.reached(models, slots, [first, both], (x,))


@pytest.mark.parametrize("shape", [(2,), (3, 5)])
def test_rows_of_runs(shape):
    checks.rows_of_runs(({"x": torch.ones(2, 5, 3), "name": "digits"}, torch.ones(2, 5)), 2)
    with pytest.raises(ValueError, match=r"with 2 runs it must be \(2, examples, ...\)"):
        checks.rows_of_runs((torch.ones(2, 5), {"x": torch.ones(shape)}), 2)
