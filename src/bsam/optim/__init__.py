"""Optimizers: one method per file, all with the same step."""

import bsam.kernels as _kernels  # noqa: F401  # its layers register with the compiler
from bsam.optim.asam import ASAM
from bsam.optim.bsam import BSAM
from bsam.optim.ivon import IVON
from bsam.optim.sam import SAM
from bsam.optim.suggestion import Suggestion, suggest
from bsam.optim.swag import SWAG
from bsam.optim.vogn import VOGN

__all__ = ["ASAM", "BSAM", "IVON", "SAM", "SWAG", "VOGN", "Suggestion", "suggest"]
