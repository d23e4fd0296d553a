"""The fast path: whole training steps compiled and captured, several runs at once."""

from bsam.engine.train_step import TrainStep

__all__ = ["TrainStep"]
