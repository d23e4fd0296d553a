"""`TrainStep`: a whole step, traced from the optimizer's own formulas, compiled, and captured in a CUDA graph.

The step of a method is its probe and its update, as in `optimizer.step`. Here they run once on tensors that only record
the operations: the probe under vmap over the splits (and the runs), on parameters packed into long buffers. The record
is compiled. Only one formula has a second copy: on CUDA a kernel samples the weights (line 3 of bSAM and VOGN), and
keeps the noise in registers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bsam.batches import map_tensors, split_batch
from bsam.engine import checks, reads
from bsam.engine.base_steps import BaseSteps, snapshot
from bsam.engine.buffers import StackedBuffers
from bsam.engine.drawing import Draws
from bsam.engine.methods import Method, method_of
from bsam.engine.packs import make_packs
from bsam.engine.rates import Rates
from bsam.engine.watch import Watch
from bsam.executor import callers_level
from bsam.interrupts import deferred
from bsam.modules import LossFunction, keys_of
from bsam.optim.base_step import clear_gradients
from bsam.optim.probing import Slot
from bsam.optim.together import obstacle_to_stacking
from bsam.torch_private import mark_as_stepped, own_layers

__all__ = ["TrainStep"]


class TrainStep:
    """A compiled training step: `step(x, y)` in place of `optimizer.step(loss_fn, x, y)`.

    Schedulers, checkpoints and resuming work as before: weights and state are the model's and the optimizer's own. The
    plain loop handles a batch whose shape differs from the example's, and a model that has changed since the step was
    made (`eval()`, frozen parameters, another layer). If a loss or gradient is not finite, the device skips the step.
    With `nonfinite="raise"` the error is raised when the device has reported the skipped step, which may be a few steps
    later, or in `check()`. A compiled step neither reads nor writes `p.grad`, except for the gradient of a torch
    optimizer.

    Numbers are compiled in. Give a number that changes, say the weight of a term of the loss, as a tensor in the batch,
    or as a tensor that you change by `fill_`. If a number, tensor or function that `loss_fn` reads is another one than
    before, the plain loop takes the step, and a warning names it. This holds for variables, attributes, and items with
    a constant key, in `loss_fn` and in functions of yours that it calls. It does not hold for what a layer reads in its
    `forward`, or what is reached through `super()`.

    Several runs can be trained together: give a list of optimizers, each with its own model of the same architecture, a
    list of loss functions, and batches whose dimension 0 is the run. One step is one step of each run. The runs may
    differ in their rates (`lr`, `rho`, `prior_precision`, `damping` and `betas`), and in all options of torch's
    optimizers.

    Args:
        optimizer: An optimizer of this package made with `module=`, or a torch optimizer.
        loss_fn: Returns the mean loss of a batch, with weights that it looks up in the module.
        example_batch: A batch. Its shapes, its types and its objects other than tensors are compiled in.
        module: The model, if the optimizer does not know it.
        compile: False runs the formulas without compiling them.
        cuda_graph: Whether to capture the step in a CUDA graph: `"auto"` on CUDA, if the step is compiled.
        precision: `"bfloat16"` runs `loss_fn` under autocast.

    Examples:
        >>> from bsam import BSAM
        >>> model = nn.Linear(3, 2)
        >>> optimizer = BSAM(model.parameters(), num_data=50, splits=2, module=model)
        >>> x, y = torch.randn(8, 3), torch.randint(2, (8,))
        >>> loss_fn = lambda x, y: nn.functional.cross_entropy(model(x), y)
        >>> step = TrainStep(optimizer, loss_fn, (x, y), compile=False)
        >>> loss = step(x, y)
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: LossFunction | Sequence[LossFunction],
        example_batch: Sequence[Any],
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        compile: bool = True,
        cuda_graph: bool | Literal["auto"] = "auto",
        precision: Literal["float32", "bfloat16"] | None = None,
    ) -> None:
        self._stacked = isinstance(optimizer, Sequence)
        self.optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        loss_fns = list(loss_fn) if isinstance(loss_fn, Sequence) else [loss_fn]
        self.modules = _modules(self.optimizers, module)
        if not len(self.optimizers) == len(loss_fns) == len(self.modules):
            raise ValueError(
                f"{len(self.optimizers)} optimizers, {len(loss_fns)} loss functions and {len(self.modules)} modules: "
                "give one of each per run."
            )
        if precision not in (None, "float32", "bfloat16"):
            raise ValueError(f"precision={precision!r} must be None, 'float32' or 'bfloat16'.")
        self.device = self.optimizers[0].param_groups[0]["params"][0].device
        if cuda_graph is True and self.device.type != "cuda":
            raise ValueError(f"cuda_graph=True needs parameters on a CUDA device, not on {self.device}.")
        self._given = loss_fns
        self._loss_fns = [_in_precision(f, precision, self.device) for f in loss_fns]
        self._methods: list[Method] = [method_of(o, m) for o, m in zip(self.optimizers, self.modules, strict=True)]
        method = self._methods[0]
        if method.process_group is not None:
            raise ValueError("process_group= goes with optimizer.step: TrainStep trains on one device only.")
        for each in self._methods:
            each._refuse_if_pending("make a TrainStep")
        checks.alike(self._methods)

        runs = len(self.optimizers)
        self._example = tuple(example_batch) if self._stacked else map_tensors(lambda t: t[None], tuple(example_batch))
        if self._stacked:
            checks.rows_of_runs(self._example, runs)
        self._shapes = _signature(self._example)
        first = map_tensors(lambda t: t[0], self._example)
        self._splits = method._option("splits")
        method._check_batch(first)
        parts = split_batch(first, self._splits)
        reason = obstacle_to_stacking(self.modules[0], method._option("batch_norm"), parts)
        if reason is None and len(parts) < self._splits:
            reason = f"a batch of {parts[0][1] * len(parts)} examples cannot be cut into {self._splits} parts"
        if reason is not None:
            raise ValueError(f"TrainStep is not possible with this batch and optimizer: {reason}.")
        self._part = parts[0][0]
        slots = [each._slots() for each in self._methods]
        keys = [keys_of(m, [slot.parameter for slot in own]) for m, own in zip(self.modules, slots, strict=True)]
        checks.one_architecture(self.modules, keys, slots)
        reached = checks.reached(self.modules, slots, self._loss_fns, self._part)

        # All checks have passed: from here on parameters and buffers become views of the tensors that the step reads.
        used = [[slot for slot, found in zip(own, reached, strict=True) if found] for own in slots]
        names = [key for key, found in zip(keys[0], reached, strict=True) if found]
        unused = [slot for slot, found in zip(slots[0], reached, strict=True) if not found]
        method._warn_of_unseen(unused)
        noisy = [method._noise_precision(slot) is not None for slot in used[0]]
        self._packs = make_packs(used, names, noisy)
        group_of = [_position(pack.runs[0][0].group, method.param_groups) for pack in self._packs]
        self._places = [
            (run, slot, group)
            for pack, group in zip(self._packs, group_of, strict=True)
            for run, own in enumerate(pack.runs)
            for slot in own
        ]
        """Every slot, with the numbers of its run and of its group."""
        self._register()
        self._buffers = StackedBuffers(self.modules)
        self._flagged = [owner for module in self.modules for owner in module.modules()]
        self._flags = self._present_flags()
        self._fixed = checks.fixed_options(self._methods)

        self._rates = Rates(self._methods, self.device)
        self._batch = [torch.zeros_like(t) for t in _tensors(self._example)]
        self._skipped = torch.tensor([m.skipped_steps for m in self._methods], device=self.device)
        for run, each in enumerate(self._methods):
            each._skipped = self._skipped[run]
        refused = torch.zeros(runs, device=self.device)  # 1 for the runs whose last step was skipped
        self._losses = torch.zeros(runs, device=self.device, dtype=torch.promote_types(torch.float32, used[0][0].dtype))
        self._draws = Draws(self._methods, self._packs, group_of, self._rates, self._splits)
        self._watch = Watch(self._skipped) if method._option("nonfinite") == "raise" else None
        captures = cuda_graph is True or (cuda_graph == "auto" and compile and self.device.type == "cuda")
        gradients: list[Tensor] = []
        self._base_steps: BaseSteps | None = None
        base_steps = [step for each in self._methods if (step := each._base_step()) is not None]
        if base_steps:
            gradients = [torch.zeros_like(pack.weights) for pack in self._packs]
            self._lr = self._rates.column("lr").float()  # (runs, groups), in the type that torch's optimizers read
            self._base_steps = BaseSteps(base_steps, self._packs, gradients, refused, capture=captures)

        from bsam.compiler.capture import Captured  # imported here, because these imports take a second
        from bsam.compiler.tracing import compile_function
        from bsam.engine.traced import TracedStep

        self._fill(_tensors(self._example))
        self._send_rates()
        traced = self._traced = TracedStep(  # an attribute, to keep its compiled gradient alive
            method,
            self.modules[0],
            self._loss_fns[0],
            self._packs,
            group_of,
            self._rates,
            self._draws.sampled,
            self._part,
            self._splits,
        )
        flat = traced.flatten(
            {
                "theta": self._draws.theta,
                "weights": [pack.weights for pack in self._packs],
                "state": [pack.state for pack in self._packs],
                "buffers": self._buffers.stacks,
                "batch": self._batch,
                "losses": self._losses,
                "skipped": self._skipped,
                "refused": refused,
                "gradients": gradients,
            }
        )
        function: Callable[..., Any] = torch.no_grad()(traced)
        if compile:  # means over up to 32 splits are fused with the kernels that read the gradients
            traced.compile_gradient(self._batch, self._buffers.stacks)
            function = compile_function(traced, flat, unrolled=min(self._splits, 32))

        def whole() -> None:
            self._draws()
            function(*flat)

        self._whole: Callable[[], None] = Captured(whole, self.device, undo=snapshot(flat)) if captures else whole
        self._fixes_values = compile or captures
        self._read = reads.values_read(loss_fns)
        self._warned = False

    # ------------------------------------------------------------------ a step

    def __call__(self, *batch: Any) -> Tensor:
        """Take one step; return the mean loss of the first pass (one loss per run, if there are several)."""
        with deferred(), torch.no_grad():
            return self._step(batch)

    def _step(self, batch: tuple[Any, ...]) -> Tensor:
        stacked = batch if self._stacked else map_tensors(lambda t: t[None], batch)
        if self._stacked:
            checks.rows_of_runs(batch, len(self.optimizers))
        checks.alike(self._methods)
        checks.unchanged(self._fixed, self._methods)
        for method in self._methods:
            method._check_changes()
            method._refuse_if_away("take a step")
            method._refuse_if_pending("take a compiled step")
            method._note_start()
        if self._watch is not None:
            self._watch.check()
        read = reads.values_read(self._given)
        other = reads.differing(self._read, read) if self._fixes_values else []
        if other:
            adopted = {id(buffer) for module in self.modules for buffer in module.buffers()}
            other = [name for name in other if id(read[name]) not in adopted]
        if other or _signature(stacked) != self._shapes or self._present_flags() != self._flags:
            self._warn_of_values(other, read)
            losses = self._loop(stacked)
            after = reads.values_read(self._given)
            self._read |= {name: after[name] for name in reads.differing(read, after)}  # it may count its own calls
            return losses
        self._adopt()
        tensors = _tensors(stacked)
        self._fill(tensors)
        self._send_rates()
        self._whole()
        if self._base_steps is not None:
            self._base_steps(self._lr)
        for optimizer in self.optimizers:
            mark_as_stepped(optimizer)
        if self._watch is not None:
            self._watch.look(self._skipped)
        for method in self._methods:
            method._count_step(tensors[0].shape[1])
        return self._losses.clone() if self._stacked else self._losses[0].clone()

    def check(self) -> None:
        """Wait for the device; with `nonfinite="raise"`, raise if it skipped a step. Call it at the end of training."""
        if self._watch is not None:
            self._watch.look(self._skipped, wait=True)

    def _loop(self, stacked: tuple[Any, ...]) -> Tensor:
        """Step each run by itself, for a batch of another shape. All runs step before an error is raised."""
        losses, errors = [], []
        for run, (method, loss_fn) in enumerate(zip(self._methods, self._loss_fns, strict=True)):
            clear_gradients(self.optimizers[run])  # a compiled step ignores them too
            try:
                losses.append(method.step(loss_fn, *_of_run(stacked, run)))
            except FloatingPointError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return torch.stack(losses) if self._stacked else losses[0]

    # ------------------------------------------------------------------ the tensors that a step reads

    def _fill(self, tensors: list[Tensor]) -> None:
        for buffer, tensor in zip(self._batch, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)

    def _send_rates(self) -> None:
        if self._rates.send() and self._base_steps is not None:
            self._lr.copy_(self._rates.column("lr"))

    def _register(self) -> None:
        """Store the states, which are views of the packs, in the optimizers."""
        for run, method in enumerate(self._methods):
            method._own([slot for pack in self._packs for slot in pack.runs[run]])
        self._addresses = [slot.parameter.data_ptr() for _, slot, _ in self._places]

    def _adopt(self) -> None:
        """Copy in the weights, states, groups and buffers that were replaced since the last step, as loading does."""
        places = zip(self._places, self._addresses, strict=True)
        if not all(self._is_ours(*place, address) for place, address in places):
            for run, slot, group in self._places:
                slot.group = self._methods[run].param_groups[group]
                if slot.state:
                    slot.state = dict(self._methods[run]._state_of(slot))
            for pack in self._packs:
                pack.adopt()
            self._register()
        self._buffers.adopt()

    def _is_ours(self, run: int, slot: Slot, group: int, address: int) -> bool:
        """Whether the step reads this parameter, group and state of a slot."""
        method = self._methods[run]
        same = slot.parameter.data_ptr() == address and slot.group is method.param_groups[group]
        return same and (not slot.state or method._state_of(slot) is slot.state)

    def _warn_of_values(self, names: list[str], read: dict[str, Any]) -> None:
        """Warn once if a loss function reads another value than when it was compiled."""
        if not names or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the loss function reads {reads.change(names[0], self._read[names[0]], read[names[0]])}. The plain loop "
            "takes these steps, which is slower. Give it as a tensor in the batch, or as a tensor that you change by "
            "fill_ or copy_.",
            stacklevel=callers_level(),
        )

    def _present_flags(self) -> list[int]:
        """Whether each module trains, which layers it has, and whether each parameter takes a gradient."""
        trains = [owner.training for owner in self._flagged]
        layers = [id(layer) for owner in self._flagged for layer in own_layers(owner).values()]
        return [*trains, *layers, *(slot.parameter.requires_grad for _, slot, _ in self._places)]


def _modules(optimizers: list[Optimizer], module: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    if module is not None:
        return [module] if isinstance(module, nn.Module) else list(module)
    found = [getattr(optimizer, "module", None) for optimizer in optimizers]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        raise ValueError(
            "TrainStep needs the model: make the optimizer with module=, or write TrainStep(..., module=)."
        )
    return known


def _in_precision(loss_fn: LossFunction, precision: str | None, device: torch.device) -> LossFunction:
    if precision != "bfloat16":
        return loss_fn

    def under_autocast(*batch: Any) -> Tensor | float:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):  # a cache would keep old weights
            return loss_fn(*batch)

    return under_autocast


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def _signature(batch: Any) -> Any:
    """Return what must be equal to the example batch: structure, shapes and types."""
    return map_tensors(lambda t: (tuple(t.shape), t.dtype), tuple(batch))


def _of_run(stacked: tuple[Any, ...], run: int) -> tuple[Any, ...]:
    of_run: tuple[Any, ...] = map_tensors(lambda t: t[run], stacked)
    return of_run


def _position(group: dict[str, Any], groups: list[dict[str, Any]]) -> int:
    return next(i for i, each in enumerate(groups) if each is group)
