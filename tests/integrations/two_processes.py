"""Two processes on the CPU that communicate through gloo."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60  # seconds after which a rank that waits for the other one raises

# The ranks are forked from a process of their own, which imports the libraries once, as far as they are installed. Most
# of the time of a fresh start would be these imports: 5 s of work for each rank.
mp.get_context("forkserver").set_forkserver_preload(["bsam", "accelerate", "transformers.trainer", "peft", "timm"])


def run_two_ranks(function, *arguments):
    """Call `function(rank, *arguments)` in two processes, which have the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, (port, function, arguments), nprocs=2, start_method="forkserver")


def _rank(rank, port, function, arguments):
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # without the interpreter's clean-up, in which gloo's threads may abort
