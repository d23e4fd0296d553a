"""Trains with two processes on the CPU, and writes the result of each: `python -m tests.integrations.ranks FOLDER`."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning")

from bsam.integrations.fabric import probe  # noqa: E402
from tests.integrations.test_lightning import CUT, Module, batches, network, trainer  # noqa: E402
from tests.optimizers import make  # noqa: E402

RANKS = {"strategy": "ddp", "devices": 2, "accelerator": "cpu"}


class InGroup(Module):
    """Its optimizer averages over the ranks itself."""

    def configure_optimizers(self):
        self.options = {"process_group": dist.group.WORLD}
        return super().configure_optimizers()


def share(rank):
    part = slice(CUT, None) if rank else slice(CUT)
    return DataLoader([(x[part], y[part]) for x, y in batches()], batch_size=None)


def train(kind, name, folder):
    module = kind(accumulate_grad_batches=2)
    module.train_dataloader = lambda: share(dist.get_rank())
    found = trainer(folder, use_distributed_sampler=False, **RANKS)
    found.fit(module)
    torch.save(module.network.state_dict(), f"{folder}/{name}-{found.global_rank}.pt")


def train_with_fabric(fabric, name, folder, **options):
    own = network()
    model, optimizer = fabric.setup(own, make("BSAM", own.parameters(), **options))
    for i, (x, y) in enumerate(share(fabric.global_rank)):
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):  # as Fabric's docs accumulate gradients
            probe(fabric, model, optimizer, lambda x, y: F.cross_entropy(model(x), y), x, y)
        if i % 2:
            optimizer.step()
    torch.save(own.state_dict(), f"{folder}/{name}-{fabric.global_rank}.pt")
    if not options:
        with pytest.raises(ValueError, match="nothing would average its gradients"):
            probe(fabric, own, optimizer, lambda x, y: F.cross_entropy(own(x), y), x, y)


def main(folder):
    train(Module, "ddp", folder)
    train(InGroup, "group", folder)
    fabric = lightning.Fabric(**RANKS)
    fabric.launch()
    train_with_fabric(fabric, "fabric", folder)
    train_with_fabric(fabric, "fabric-group", folder, process_group=dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # without the interpreter's clean-up, in which gloo's threads may abort
