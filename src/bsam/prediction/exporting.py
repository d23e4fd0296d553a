"""Exports a predictor: as a program of `torch.export`, or as an ONNX file.

A program contains the samples. Stacked, it has the network once, in a loop over the samples (ONNX: `Scan`). Unrolled,
it has the network num_samples times, which takes minutes to export for a deep network and many samples. torch 2.8 has
no such loop, so there all programs are unrolled. Every program is run once and compared with the predictor.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bsam.files import replacing
from bsam.torch_private import pytree

if TYPE_CHECKING:
    from bsam.prediction.predictor import Predictor

__all__ = ["export_program", "write_onnx"]

_MOST_ONNX_BYTES = 2**31 - 2**20
"""Largest size of the weights in an ONNX file, which must be smaller than 2 GiB."""
_OLDEST_FOR_ONNX = "2.11"
"""The oldest torch on which ONNX files were written; the exporter of 2.8 fails."""


def export_program(predictor: Predictor, inputs: Any, dynamic_shapes: Any, unroll: bool | None) -> ExportedProgram:
    """Return the predictor as a program. The arguments are those of `Predictor.export`."""
    call = _Call(inputs, dynamic_shapes)
    expected = call.run(predictor)
    return _attempt(lambda unrolled: _program(predictor, call, expected, unrolled), unroll)


def _program(predictor: Predictor, call: _Call, expected: dict[str, Tensor], unrolled: bool) -> ExportedProgram:
    module = _Exported(predictor.unrolled() if unrolled else predictor, call.signature)
    arguments, keywords = pytree.tree_map_only(Tensor, Tensor.detach, (call.arguments, call.keywords))
    # Not the caller's tensors: torch.export marks those whose sizes may change.
    program = torch.export.export(module, arguments, keywords, dynamic_shapes=call.shapes)
    _compare("torch.export", expected, call.run(program.module()))
    return program


def write_onnx(
    predictor: Predictor, path: str | os.PathLike[str], inputs: Any, dynamic_shapes: Any, unroll: bool | None
) -> None:
    """Write the predictor as an ONNX file. The arguments are those of `Predictor.to_onnx`."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"to_onnx needs {error.name}, which is missing. In the folder of bsam's source, write: "
            "pip install '.[export]'"
        ) from error
    if torch.__version__ < _OLDEST_FOR_ONNX:
        raise RuntimeError(
            f"to_onnx needs torch {_OLDEST_FOR_ONNX} or newer, and this is torch {torch.__version__}: "
            "install a newer torch, or write predictor.export(inputs), a program that needs PyTorch to run."
        )
    size = sum(tensor.numel() * tensor.element_size() for tensor in chain(predictor.parameters(), predictor.buffers()))
    if size > _MOST_ONNX_BYTES:
        raise ValueError(
            f"the weights take {size / 2**30:.1f} GiB, and an ONNX file holds less than 2 GiB: use fewer samples, "
            "or write torch.onnx.export(predictor.export(inputs), f=path, dynamo=True, external_data=True)."
        )
    call = _Call(inputs, dynamic_shapes)
    given = call.tensors()
    expected = call.run(predictor)

    def write(unrolled: bool) -> None:
        program = _program(predictor, call, expected, unrolled)
        onnx_program = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=list(given), output_names=list(expected)
        )
        assert onnx_program is not None
        for node in onnx_program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces with the paths of this machine
        with replacing(Path(path)) as temporary:
            onnx_program.save(os.fspath(temporary), external_data=False)
            session = onnxruntime.InferenceSession(os.fspath(temporary), providers=["CPUExecutionProvider"])
            found = session.run(None, {name: tensor.cpu().numpy() for name, tensor in given.items()})
            _compare("ONNX Runtime", expected, dict(zip(expected, map(torch.from_numpy, found), strict=True)))

    _attempt(write, unroll)


class _Call:
    """The inputs of an exported program, which has an argument of a name for each of them.

    Args:
        inputs: A tensor, a tuple of positional arguments, or a dictionary of keywords, as batches have them.
        dynamic_shapes: Which sizes may change, as for `Predictor.export`.
    """

    def __init__(self, inputs: Any, dynamic_shapes: Any) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            self.keywords = self.named = dict(inputs)
        else:
            self.arguments = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
            names = ["input"] if len(self.arguments) == 1 else [f"input_{i}" for i in range(len(self.arguments))]
            self.named = dict(zip(names, self.arguments, strict=True))
        self.shapes = self._free_batch() if dynamic_shapes == "batch" else dynamic_shapes

    @property
    def signature(self) -> inspect.Signature:
        """The signature of a function with these arguments."""
        kind = inspect.Parameter.KEYWORD_ONLY if self.keywords else inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in self.named])

    def run(self, module: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
        """Call a module with these inputs."""
        with torch.no_grad():
            return module(*self.arguments, **self.keywords)

    def tensors(self) -> dict[str, Tensor]:
        """Return the inputs by name; raise unless all are tensors, as in an ONNX file."""
        for name, value in self.named.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{name} is of type {type(value).__name__}: the inputs of an ONNX file are tensors. Make the "
                    "predictor with forward=lambda model, inputs: ... that makes other arguments."
                )
        return self.named

    def _free_batch(self) -> dict[str, Any]:
        """Return the `dynamic_shapes` that leave the number of examples free, up to a limit that the network sets."""

        def shape_of(value: Any) -> dict[int, Any] | None:
            if not isinstance(value, Tensor) or value.ndim == 0:
                return None
            if len(value) < 2:
                raise ValueError(
                    "inputs has one example, from which torch.export cannot see which sizes are the number of "
                    "examples: give two or more."
                )
            return {0: Dim.DYNAMIC}  # a named Dim refuses limits: BatchNorm on CUDA asks for at most 65,535

        return {name: pytree.tree_map(shape_of, value) for name, value in self.named.items()}


class _Exported(nn.Module):
    """A module with another signature: torch.export reads the names of the inputs there."""

    def __init__(self, module: nn.Module, signature: inspect.Signature) -> None:
        super().__init__()
        self.module = module

        def forward(*inputs: Any, **keywords: Any) -> Any:
            return module(*inputs, **keywords)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward


Made = TypeVar("Made")


def _attempt(make: Callable[[bool], Made], unroll: bool | None) -> Made:
    """Return make(unrolled): stacked, and unrolled if that fails, or as `unroll` says."""
    failures: dict[str, Exception] = {}
    for unrolled in (False, True) if unroll is None else (unroll,):
        try:
            with _exporting():
                return make(unrolled)
        except OSError:  # of the disk, on which another program would not be written either
            raise
        except Exception as error:
            failures["unrolled" if unrolled else "stacked"] = error
    said = "; ".join(f"{how}: {_reason(error)}" for how, error in failures.items())
    raise RuntimeError(
        f"the predictor cannot be exported ({said}). Python code that depends on the values of tensors cannot be a "
        "part of a program. If the number of examples is the reason, write dynamic_shapes=None to fix it."
    ) from list(failures.values())[-1]


def _reason(error: BaseException) -> str:
    """Return the first line of the error that began a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Export without gradients, without PyTorch's remarks, and without a fused kernel that ONNX does not have."""
    logger, fused = logging.getLogger("torch"), torch.backends.mha.get_fastpath_enabled()
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        torch.backends.mha.set_fastpath_enabled(False)
        # It prints the graph of an attempt that fails.
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fused)


def _compare(where: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise if exported predictions are not those of the predictor."""
    for name, tensor in expected.items():
        a, b = tensor.detach().cpu().double(), found[name].detach().cpu().double()
        scale = max(1.0, float(a.nan_to_num(0, 0, 0).abs().max()))
        if not torch.allclose(a, b, rtol=0, atol=1e-3 * scale, equal_nan=True):
            largest = float((a - b).abs().max())
            raise RuntimeError(f"{where} gives other numbers: {name} differs by {largest:.3g}")
