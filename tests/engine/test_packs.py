"""Packs: parameters and states as views of few buffers."""

from tests.engine.runs import Run, batches_of, every_optimizer, network_of, stack, stacked
from tests.networks import assert_close, make_batch


@every_optimizer
def test_parameters_stay_where_and_what_they_are(name):
    network = network_of(name)
    run = Run(name, network)
    parameters, buffers = list(run.model.parameters()), dict(run.model.named_buffers())
    batch = make_batch(network, 16)
    step = run.engine(batch)
    addresses = run.addresses()
    for _ in range(3):
        step(*batch)
        assert run.addresses() == addresses
    assert all(a is b for a, b in zip(run.model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(run.optimizer.param_groups[0]["params"], parameters, strict=True))
    assert all(p.is_leaf and p.requires_grad for p in parameters)
    assert dict(run.model.named_buffers()).keys() == buffers.keys()


def test_parameters_of_vogn_start_each_by_itself():
    """The first step of a parameter has no noise, and begins its curvature: also beside others that have begun."""
    together, alone = ([Run("VOGN", seed=seed) for seed in (3, 5)] for _ in range(2))
    batches = batches_of("mlp", 2)
    step = stacked(together, batches)
    for run, batch in zip(alone, batches, strict=True):
        run.loop(*batch)
    for number, (run, other) in enumerate(zip(alone, together, strict=True)):
        saved = run.state()
        saved["optimizer"]["state"][number + 1]["step"].zero_()
        for each in (run, other):
            each.model.load_state_dict(saved["model"])
            each.optimizer.load_state_dict(saved["optimizer"])
    for _ in range(2):
        losses = step(*stack(batches))
        assert_close(list(losses), [run.loop(*batch) for run, batch in zip(alone, batches, strict=True)])
    for one, other in zip(together, alone, strict=True):
        assert_close(one.state(), other.state())
