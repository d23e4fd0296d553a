"""Optimizers: one method a file, all on the same step."""

from bsam.optim.bsam import BSAM
from bsam.optim.sam import SAM
from bsam.optim.swag import SWAG
from bsam.optim.vogn import VOGN

__all__ = ["BSAM", "SAM", "SWAG", "VOGN"]
