"""Names, buffers, snapshots and modes of modules."""

import torch

from bsam.modules import clean_names, preserved
from tests.posterior.kinds import make_net, same, snapshot


def test_clean_names():
    assert clean_names([]) == {}
    assert clean_names(["a._orig_mod.w"]) == {"a._orig_mod.w": "a.w"}
    assert clean_names(["module.a", "head"]) == {"module.a": "module.a", "head": "head"}  # a layer, not a wrapper


def test_preserved_restores_everything():
    net = make_net()
    before = snapshot(net)
    with preserved(net), torch.no_grad():
        for t in (*net.parameters(), *net.buffers()):
            t.zero_()
    assert same(before, snapshot(net))
