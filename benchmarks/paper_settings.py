"""The paper's settings of bSAM, for measurements that go on from older records."""

from __future__ import annotations

from typing import Any

__all__ = ["BSAM"]

BSAM: dict[str, Any] = {
    "lr": 0.1,
    "rho": 0.01,
    "prior_precision": 25.0,
    "betas": (0.9, 0.999),
    "damping": 0.1,
    "sqrt_num_data": False,
    "max_noise": None,
    "max_grad_norm": None,  # clipping reads all gradients once more
}
