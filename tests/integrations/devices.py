"""The devices on which tests of float16 run."""

import pytest
import torch

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
