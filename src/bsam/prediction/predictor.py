"""A model and samples of its weights as one module: averaged predictions for deployment.

The samples are drawn once, as `bsam.predict` draws them: sample i is the i-th draw of a generator with the given seed.
They are stored in stacks (num_samples, ...). Parameters that are points, and buffers, are stored once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call

from bsam.executor import Executor
from bsam.files import naming, read_file, write_file
from bsam.modules import Forward, call_model, named_buffers, named_parameters, output_tensor, unwrapped
from bsam.posterior.base import Posterior, check_tensors_fit
from bsam.prediction.averages import average_for
from bsam.prediction.exporting import export_program, write_onnx
from bsam.prediction.passes import Passes, calibration_batches, run_together
from bsam.prediction.predict import at_mean, check_integer, noise_of
from bsam.prediction.results import entropy
from bsam.torch_private import scan_stack

__all__ = ["Predictor"]

_FORMAT, _KIND = "bsam.predictor", "ensemble"
_SETTINGS = ("likelihood", "noise_std", "class_dim", "num_samples", "seed", "weights")


class Predictor(nn.Module):
    """A module that averages predictions over samples of a posterior.

    `predictor(inputs)` is called as the model is, and returns a dictionary of tensors on the model's device. With the
    same seed they are those of `bsam.predict`:

    - classes: `"probs"` (n, ..., K), `"entropy"` (n, ...) and `"mutual_information"` (n, ...);
    - regression: `"mean"`, `"std"` (of a measurement) and `"epistemic_std"` (of the output over the samples).

    The predictor has a copy of the model, and is always in evaluation mode. Its memory is `num_samples` times that of
    the sampled parameters, and once the others. `save` and `load` need the class of the model; `to_onnx` and `export`
    write a program that needs neither it nor this package.

    Args:
        model: The model. It need not hold the weights of the posterior. Its device is where the predictor is.
        posterior: The distribution of its weights.
        num_samples: Number of samples; 0 predicts with the mean. Of a `Mixture` as for `bsam.predict`; the predictor's
            own `num_samples` is then the number of its networks.
        seed: Seed of the samples.
        likelihood: As for `bsam.predict`.
        noise_std: As for `bsam.predict`.
        class_dim: As for `bsam.predict`.
        forward: `forward(model, inputs)` runs the model, if `model(inputs)` is not the right call.
        recalibrate: Training data to estimate BatchNorm's running statistics again at each sample, as for
            `bsam.predict`.
        batch_size: Largest batch when `recalibrate` is tensors.
        vectorise: True: vmap over the samples, or an error. False: a loop. None: vmap on an accelerator, unless it
            fails; a loop on the CPU.

    Examples:
        >>> from bsam.posterior import DiagonalGaussian
        >>> model = nn.Linear(4, 3)
        >>> posterior = DiagonalGaussian.from_model(model, {model.weight: torch.full_like(model.weight, 0.1)})
        >>> predictor = Predictor(model, posterior, num_samples=8)
        >>> predictor(torch.randn(5, 4))["probs"].shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        *,
        num_samples: int = 32,
        seed: int = 0,
        likelihood: Literal["categorical", "bernoulli", "gaussian"] = "categorical",
        noise_std: float | None = None,
        class_dim: int | None = None,
        forward: Forward | None = None,
        recalibrate: Any = None,
        batch_size: int = 512,
        vectorise: bool | None = None,
    ) -> None:
        check_integer("num_samples", num_samples, 0, "Write 0 to predict with the mean.")
        check_integer("seed", seed, -(2**63))
        check_integer("batch_size", batch_size, 1)
        calibration = calibration_batches(recalibrate, batch_size)
        model = unwrapped(model)
        noise_std = noise_of(model, posterior, likelihood, noise_std)
        settings: dict[str, Any] = {
            "likelihood": likelihood,
            "noise_std": noise_std,
            "class_dim": class_dim,
            "num_samples": num_samples,
            "seed": seed,
        }
        average_for(likelihood, noise_std, class_dim=class_dim)  # raises if they do not fit each other
        with at_mean(model, posterior) as device:
            passes = Passes(
                model,
                posterior.to(device),
                forward=forward,
                num_samples=num_samples,
                seed=seed,
                chunk=max(1, sum(posterior.num_draws(num_samples))),
                vectorise=False,
                device=device,
                recalibrate=calibration,
            )
            samples = passes.samples()
            if samples:
                settings["num_samples"] = len(next(iter(samples.values())))
            settings["weights"] = passes.weights
            self._assemble(copy.deepcopy(model), samples, settings, forward, vectorise)

    def _assemble(
        self,
        model: nn.Module,
        samples: Mapping[str, Tensor],
        settings: dict[str, Any],
        forward: Forward | None,
        vectorise: bool | None,
    ) -> None:
        """Make the predictor from a model that it may keep, and stacks of weights by their names in this model."""
        super().__init__()
        self.likelihood: str = settings["likelihood"]
        self.noise_std: float | None = settings["noise_std"]
        self.class_dim: int | None = settings["class_dim"]
        self.num_samples: int = settings["num_samples"]
        self.seed: int = settings["seed"]
        self.weights: list[float] | None = settings.get("weights")  # a file of an earlier version has none
        self._start = average_for(self.likelihood, self.noise_std, class_dim=self.class_dim)
        self.network = _Network(model, forward)
        self.samples = nn.Module()
        for name, stack in samples.items():
            self.samples.register_buffer(name.replace(".", "/"), stack.detach())  # a name may not have dots
        for name, parameter in self.network.model.named_parameters():
            parameter.requires_grad_(False)
            if name in samples:  # a pass that does not use the sample fails, and does not predict with the mean
                parameter.data = parameter.data.new_empty((0,) * max(1, parameter.ndim))
        self._executor = Executor(
            vectorise, "predictions are computed in a loop over the samples", self.network, errors=Exception
        )
        self._members: tuple[list[int], list[nn.Module]] | None = None
        self.eval()

    # ------------------------------------------------------------------ predictions

    def forward(self, *inputs: Any, **keywords: Any) -> dict[str, Tensor]:
        """Return averaged predictions. The arguments are those of the model, or the `inputs` of `forward`."""
        stack = self._stack()
        if not stack:
            outputs = self.network(inputs, keywords)[None]
        elif torch.compiler.is_exporting():
            outputs = self._scanned(stack, inputs, keywords)
        else:
            device = next(iter(stack.values())).device
            outputs = self._executor.run(
                lambda: run_together(self.network, stack, (inputs, keywords)),
                lambda: torch.stack([member(inputs, keywords) for member in self._all_members()]),
                pays=Executor.launch_bound(device),
            )
        return self._average(outputs)

    def _average(self, outputs: Tensor) -> dict[str, Tensor]:
        """Average the outputs (samples, n, ...) of all samples."""
        average = self._start(None)
        average.add(outputs, self.weights)
        columns = {name: column for name, column in average.columns().items() if column is not None}
        if self.noise_std is None:
            log_probs = columns["log_probs"]
            return {
                "probs": log_probs.exp(),
                "entropy": entropy(log_probs),
                "mutual_information": columns["mutual_information"],
            }
        variance = columns["epistemic_variance"]
        return {
            "mean": columns["mean"],
            "std": (variance + self.noise_std**2).sqrt(),
            "epistemic_std": variance.sqrt(),
        }

    def _named_samples(self) -> dict[str, Tensor]:
        """Return the samples by their names in the model."""
        return {name.replace("/", "."): stack for name, stack in self.samples.named_buffers()}

    def _stack(self) -> dict[str, Tensor]:
        """Return the samples by their names in the network."""
        return {f"model.{name}": stack for name, stack in self._named_samples().items()}

    def _scanned(self, stack: dict[str, Tensor], inputs: Any, keywords: Any) -> Tensor:
        def run(weights: list[Tensor]) -> Tensor:
            handed = dict(zip(stack, weights, strict=True))
            outputs: Tensor = functional_call(self.network, handed, (inputs, keywords))
            return outputs

        return scan_stack(run, list(stack.values()))

    def _all_members(self) -> list[nn.Module]:
        """Return one network per sample; they share the memory of the samples and of all other tensors."""
        tensors = [*self.parameters(), *self.buffers()]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._members is None or self._members[0] != addresses:  # `to` and others move the tensors
            self._members = addresses, [self._member(i) for i in range(self.num_samples)]
        return self._members[1]

    def _member(self, i: int, clone: bool = False) -> nn.Module:
        """Make the network of sample i; its own weights are views of the stack, or copies."""
        own = dict(chain(self.network.named_parameters(), self.network.named_buffers()))
        made: dict[int, Any] = {id(tensor): tensor for tensor in own.values()}  # what deepcopy need not copy
        for name, stack in self._stack().items():
            weights = stack[i].clone() if clone else stack[i]
            is_parameter = isinstance(own[name], nn.Parameter)
            made[id(own[name])] = nn.Parameter(weights, requires_grad=False) if is_parameter else weights
        made[id(self.network.call)] = self.network.call
        return copy.deepcopy(self.network, made)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, in which the predictions of a posterior are defined."""
        return super().train(False)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"likelihood={self.likelihood!r}, num_samples={self.num_samples}, seed={self.seed}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": None}  # they are views, and made again

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write samples, points, buffers and settings into one safetensors file, for `load`.

        A file at `path` is replaced completely or not at all. The code of the model is not written.
        """
        model = self.network.model
        names = _clean_names(model)
        tensors = {f"sample/{names[name]}": stack for name, stack in self._named_samples().items()}
        for group, own in (("point", named_parameters(model)), ("buffer", named_buffers(model))):
            rest = {name: tensor for name, tensor in own.items() if f"sample/{name}" not in tensors}
            tensors |= {f"{group}/{name}": tensor for name, tensor in rest.items()}
        settings = {name: getattr(self, name) for name in _SETTINGS}
        write_file(path, tensors, format=_FORMAT, kind=_KIND, settings=settings)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        forward: Forward | None = None,
        vectorise: bool | None = None,
    ) -> Self:
        """Read a file that `save` wrote, with the settings of then. Neither posterior nor training data are needed.

        Args:
            path: The file.
            model: A model with the architecture of then, on the device of choice. Its weights do not matter.
            forward: As for the constructor: a file has no code.
            vectorise: As for the constructor.
        """
        _, tensors, settings = read_file(path, format=_FORMAT, kinds=(_KIND,))
        model = copy.deepcopy(unwrapped(model))
        groups: dict[str, dict[str, Tensor]] = {"sample": {}, "point": {}, "buffer": {}}
        with naming(path):
            for key, tensor in tensors.items():
                group, _, name = key.partition("/")
                groups[group][name] = tensor
            for name in ("num_samples", "seed"):
                check_integer(name, settings[name], 0 if name == "num_samples" else -(2**63))
            average_for(settings["likelihood"], settings["noise_std"], class_dim=settings["class_dim"])
            _check_weights(settings.get("weights"), settings["num_samples"])
            for name, stack in groups["sample"].items():
                if stack.ndim == 0 or not 0 < len(stack) == settings["num_samples"]:
                    raise ValueError(f"{name} has shape {tuple(stack.shape)}: its first dimension must be num_samples.")
        first = {name: stack[0] for name, stack in groups["sample"].items()}
        parameters = named_parameters(model)
        weights = {name: tensor for name, tensor in first.items() if name in parameters} | groups["point"]
        buffers = {name: tensor for name, tensor in first.items() if name not in parameters} | groups["buffer"]
        check_tensors_fit("the predictor", weights, buffers, model)
        targets = {**parameters, **named_buffers(model)}
        with torch.no_grad():
            for name, tensor in (groups["point"] | groups["buffer"]).items():
                targets[name].copy_(tensor)
        raw = {name: raw for raw, name in _clean_names(model).items()}
        samples = {raw[name]: stack.to(targets[name]) for name, stack in groups["sample"].items()}
        predictor = cls.__new__(cls)
        predictor._assemble(model, samples, settings, forward, vectorise)
        return predictor

    # ------------------------------------------------------------------ export

    def export(self, inputs: Any, *, dynamic_shapes: Any = "batch", unroll: bool | None = None) -> ExportedProgram:
        """Return the predictor as a program of `torch.export`, which needs neither the model's code nor this package.

        `torch.export.save` writes it to a file, and `torch.export.load(path).module()` runs it.

        Args:
            inputs: Inputs of two or more examples: a tensor, a tuple of positional arguments, or a dictionary of
                keywords. They show the shapes, and are predicted once to compare the program with the predictor.
            dynamic_shapes: Which sizes may change, as for `torch.export.export`. By default dimension 0 of all tensors,
                the number of examples. None fixes all sizes. If the network limits the number, the program does, too.
            unroll: False: the network is in the program once, in a loop over the samples. True: it is there for each
                sample, which takes longer to export; layers before all sampled weights then run once in ONNX Runtime.
                None: the loop, and unrolled where that is not possible.
        """
        return export_program(self, inputs, dynamic_shapes, unroll)

    def to_onnx(
        self,
        path: str | os.PathLike[str],
        inputs: Any,
        *,
        dynamic_shapes: Any = "batch",
        unroll: bool | None = None,
    ) -> None:
        """Write the predictor as an ONNX file, which runs without Python, PyTorch and this package.

        Its inputs are called `input` (`input_0`, `input_1`, ..., or the keywords, if there are several) and its outputs
        as those of the predictor. The file is run once in ONNX Runtime and compared with the predictor before it
        replaces a file at `path`. Needs `pip install '.[export]'`.

        Args:
            path: The file.
            inputs: As for `export`.
            dynamic_shapes: As for `export`.
            unroll: As for `export`.
        """
        write_onnx(self, path, inputs, dynamic_shapes, unroll)

    def unrolled(self) -> nn.Module:
        """Return a module that predicts the same with one network per sample, each with its own sampled weights."""
        return _Unrolled(self) if self._stack() else self


def _check_weights(weights: Any, num_samples: int) -> None:
    """Raise unless a file's weights of the samples are None, or positive numbers that sum to 1."""
    if weights is None:
        return
    if len(weights) != num_samples or not all(weight > 0 for weight in weights) or abs(sum(weights) - 1) > 1e-6:
        raise ValueError(f"weights must be {num_samples} positive numbers that sum to 1.")


class _Network(nn.Module):
    """A model and the function that runs it."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model = model
        self.call = forward

    def forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        """Return the outputs (n, ...)."""
        if self.call is None and (keywords or len(inputs) != 1):
            return output_tensor(self.model(*inputs, **keywords))
        if keywords and inputs:
            raise TypeError("forward(model, inputs) takes one argument: give positional arguments or keywords.")
        tree = keywords or (inputs[0] if len(inputs) == 1 else inputs)
        return output_tensor((self.call or call_model)(self.model, tree))


class _Unrolled(nn.Module):
    """One network per sample. They share all parameters that are points."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self._predictor = [predictor]  # in a list, so that its stacks are not a part of this module
        self.members = nn.ModuleList(predictor._member(i, clone=True) for i in range(predictor.num_samples))

    def forward(self, *inputs: Any, **keywords: Any) -> dict[str, Tensor]:
        return self._predictor[0]._average(torch.stack([member(inputs, keywords) for member in self.members]))


def _clean_names(model: nn.Module) -> dict[str, str]:
    """Map the names of parameters and persistent buffers to names without the prefixes of wrappers."""
    clean = {id(tensor): name for name, tensor in chain(named_parameters(model).items(), named_buffers(model).items())}
    own = chain(model.named_parameters(), model.named_buffers())
    return {name: clean[id(tensor)] for name, tensor in own if id(tensor) in clean}
