"""Trains with two processes on the CPU, and writes the result of each: `python -m tests.integrations.ranks FOLDER`."""

import sys

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from bsam.integrations.fabric import probe
from tests.integrations.test_lightning import SIZE, Module, batches, network, trainer
from tests.optimizers import make


class InGroup(Module):
    """Its optimizer averages over the ranks itself."""

    def configure_optimizers(self):
        self.options = {"process_group": dist.group.WORLD}
        return super().configure_optimizers()


def halves(rank):
    half = slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)
    return DataLoader([(x[half], y[half]) for x, y in batches()], batch_size=None)


def main(folder):
    ranks = {"strategy": "ddp", "devices": 2}
    for kind, name in ((Module, "ddp"), (InGroup, "group")):
        module = kind(accumulate_grad_batches=2)
        found = trainer(folder, use_distributed_sampler=False, **ranks)
        module.train_dataloader = lambda: halves(dist.get_rank())
        found.fit(module)
        torch.save(module.network.state_dict(), f"{folder}/{name}-{found.global_rank}.pt")
    fabric = lightning.Fabric(accelerator="cpu", **ranks)
    fabric.launch()
    own = network()
    model, optimizer = fabric.setup(own, make("BSAM", own.parameters()))
    for i, (x, y) in enumerate(halves(fabric.global_rank)):
        probe(fabric, optimizer, lambda x, y: F.cross_entropy(model(x), y), x, y)
        if i % 2:
            optimizer.step()
    torch.save(own.state_dict(), f"{folder}/fabric-{fabric.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
