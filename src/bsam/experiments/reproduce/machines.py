"""Machines: where the runs of a command are trained. Workers of this machine, or a cluster of Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bsam.experiments.choices import Scale
from bsam.experiments.options import Work
from bsam.experiments.reproduce.cluster import check_address, connected, marked
from bsam.experiments.reproduce.storage import Storage
from bsam.experiments.reproduce.workers import run_all, share_cores
from bsam.experiments.runs import choose_device

__all__ = ["Machines", "check_options", "find_storage", "machines"]


@dataclass(frozen=True)
class Machines:
    """How to train on some machines."""

    run_all: Callable[..., dict[int, str]]
    """Works on all items: `bsam.experiments.reproduce.workers.run_all`, or that of a cluster."""
    settings: dict[str, Any]
    """Device, data and time between checkpoints: options of `execute`."""
    stacked: bool
    """Whether runs are trained together that differ in seeds and rates only."""


def check_options(options: Work) -> None:
    """Raise if the options do not fit each other, or if Ray is asked for and not installed."""
    if options.on is not None:
        check_address(options.on)
    elif options.storage is not None or options.cores is not None or options.gpus is not None:
        raise ValueError("--storage, --cores and --gpus are for Ray: write also --on ray, or --on ray://HOST:PORT.")


def find_storage(options: Work, scale: Scale) -> Storage | None:
    """Return the storage that the options name; each scale has a folder of its own there."""
    if options.storage is None:
        return None
    return Storage(options.storage if scale == "full" else f"{options.storage.rstrip('/')}/{scale}")


@contextmanager
def machines(
    options: Work, *, small: bool, folders: Iterable[Path], storage: Storage | None = None
) -> Iterator[Machines]:
    """Make workers, or connect to a cluster whose nodes can write to the folders, or to the storage.

    Args:
        options: How to train.
        small: Whether the networks are too small for more than one thread.
        folders: Folders of runs and records; on a cluster their names are absolute.
        storage: Storage of the runs, on a cluster.
    """
    settings: dict[str, Any] = {"device": options.device, "data": options.data, "save_minutes": options.save_minutes}
    if options.on is None:
        device = choose_device(options.device).type
        jobs, threads = share_cores(options.jobs, small=small, accelerated=device != "cpu")
        torch.set_num_threads(threads)
        run = functools.partial(run_all, jobs=jobs, threads=threads, retries=options.retries)
        stacked = device == "cuda"
        yield Machines(run, settings, stacked if options.stack_seeds is None else options.stack_seeds)
        return
    folders = set(folders)
    with marked(*folders):  # raises at once if they cannot be written
        if storage is not None:
            storage.check()
    with connected(options.on, cores=options.cores or 1, gpus=options.gpus, device=options.device) as cluster:
        if storage is not None:
            cluster.check_storage(storage)
        else:
            cluster.check_folders(*folders)
        run = functools.partial(cluster.run_all, jobs=options.jobs, retries=options.retries, wait=storage is None)
        settings["device"] = options.device or (None if cluster.gpus else "cpu")
        settings["data"] = None if options.data is None else options.data.absolute()
        yield Machines(run, settings, cluster.gpus > 0 if options.stack_seeds is None else options.stack_seeds)
