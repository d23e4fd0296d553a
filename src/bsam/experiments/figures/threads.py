"""One thread for torch while something small is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers do not gain from threads, and on a busy machine waiting for them costs minutes.

    It is a decorator too: `@one_thread()`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
