"""Compiled and captured training steps, for one run or several at once."""

from bsam.engine.train_step import TrainStep

__all__ = ["TrainStep"]
