"""`TrainStep`: a whole step, traced from the optimizer's own formulas, compiled, and captured in a CUDA graph.

The step of a method is its probe and its update, as in `optimizer.step`. Here they are run once on tensors that only
record what is done with them: the probe under vmap over the splits (and the runs), on parameters packed into long
buffers. What was recorded is compiled. There is no second copy of any formula but one: on CUDA the sampling of line 3
of bSAM and VOGN is a kernel of its own, because it keeps its noise in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from bsam.engine import checks
from bsam.engine.checks import RATES
from bsam.engine.methods import Method, TorchStep, clear_gradients, method_of
from bsam.engine.packs import Pack, PackSlot, make_packs
from bsam.engine.watch import Watch
from bsam.forward import map_tensors
from bsam.gradients import LossFunction, LossModule, keys_of
from bsam.interrupts import deferred
from bsam.optim.base import all_finite, clip_gradient
from bsam.optim.batch import split_batch
from bsam.optim.gaussian import GaussianOptimizer
from bsam.optim.probing import Slot
from bsam.optim.together import GradAtStack, probe_stack, why_not
from bsam.optim.vogn import VOGN

if TYPE_CHECKING:
    from bsam.engine.program import Program

__all__ = ["TrainStep"]


class TrainStep:
    """A compiled training step: `step(x, y)` in place of `optimizer.step(loss_fn, x, y)`.

    Schedulers, checkpoints and resuming work as before: weights and state are the model's and the optimizer's own. A
    batch of another shape than the example, or a model in another mode (`eval()`, frozen parameters) than when the step
    was made, goes through the plain loop. A step that meets a loss or gradient that is not finite is left out, on the
    device; with `nonfinite="raise"` the error comes as soon as the device has said so, which may be a few steps later,
    or when `check()` asks. Gradients that are in `p.grad` before a step play no part in it; `p.grad` is left alone,
    unless a torch optimizer needs it or the step goes through the loop.

    Several runs can be trained together: give a list of optimizers, each with a model of its own and of the same
    architecture, a list of loss functions, and batches with a dimension of runs in front. One step is one step of
    each run. The runs may differ in their rates: `lr`, `rho`, `prior_precision`, `damping` and `betas`, and the weight
    decay and momentum of torch's optimizers.

    Args:
        optimizer: BSAM, SAM or VOGN made with `module=`, or one of `torch.optim`.
        loss_fn: Returns the mean loss of the batch it is given, with weights it looks up in the module.
        example_batch: A batch. Its shapes and types are compiled in, and whatever in it is no tensor.
        module: The model, where the optimizer does not know it.
        compile: False runs the traced formulas as they are.
        cuda_graph: Whether to capture the step: `"auto"` on CUDA, if the step is compiled.
        precision: `"bfloat16"` runs `loss_fn` under autocast.

    Examples:
        >>> from bsam import BSAM
        >>> model = nn.Linear(3, 2)
        >>> optimizer = BSAM(model.parameters(), lr=0.1, num_data=50, splits=2, module=model)
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
                "give one of each for a run."
            )
        if precision not in (None, "float32", "bfloat16"):
            raise ValueError(f"precision={precision!r} must be None, 'float32' or 'bfloat16'.")
        self.device = self.optimizers[0].param_groups[0]["params"][0].device
        if cuda_graph is True and self.device.type != "cuda":
            raise ValueError(f"cuda_graph=True needs parameters on a CUDA device, not on {self.device}.")
        self._loss_fns = [_in_precision(f, precision, self.device) for f in loss_fns]
        self._methods: list[Method] = [method_of(o, m) for o, m in zip(self.optimizers, self.modules, strict=True)]
        method = self._methods[0]
        if method.process_group is not None:
            raise ValueError("process_group= goes with optimizer.step: TrainStep trains on one device.")
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
        reason = why_not(self.modules[0], method._option("batch_norm"), parts)
        if reason is None and len(parts) < self._splits:
            reason = f"a batch of {parts[0][1] * len(parts)} examples cannot be cut into {self._splits} parts"
        if reason is not None:
            raise ValueError(f"no step can be made of this batch and optimizer: {reason}.")
        self._part = parts[0][0]
        slots = [each._slots() for each in self._methods]
        keys = [keys_of(m, [slot.parameter for slot in own]) for m, own in zip(self.modules, slots, strict=True)]
        checks.one_architecture(self.modules, keys, slots)
        reached = checks.reached(self.modules, slots, self._loss_fns, self._part)

        # All is known to be good: from here on parameters and buffers become views of what the step reads.
        kept = [[slot for slot, found in zip(own, reached, strict=True) if found] for own in slots]
        names = [key for key, found in zip(keys[0], reached, strict=True) if found]
        left = [[slot for slot, found in zip(own, reached, strict=True) if not found] for own in slots]
        method._warn_of_unseen(left[0], stacklevel=3)
        self._packs = make_packs(kept, names)
        self._owners = {
            number: pack.owners()
            for number, pack in enumerate(self._packs)
            if isinstance(method, VOGN) and len(pack.names) > 1
        }
        """Of VOGN's packs, which asks for each element whether its parameter has taken a step: see `PackSlot`."""
        self._group_of = [_position(pack.runs[0][0].group, method.param_groups) for pack in self._packs]
        """The number of each pack's group."""
        self._places = [
            (run, slot, group)
            for pack, group in zip(self._packs, self._group_of, strict=True)
            for run, own in enumerate(pack.runs)
            for slot in own
        ]
        """Every slot, with the numbers of its run and of its group."""
        self._register()
        self._adopt_buffers()
        self._flagged = [owner for module in self.modules for owner in module.modules()]
        self._flags = self._present_flags()
        self._fixed = checks.fixed_options(self._methods)

        shape = (runs, len(method.param_groups), len(RATES) + 2)
        self._rates = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self._lr = self._rates[..., RATES.index("lr")].float()
        """The learning rates as torch's optimizers read them: (runs, groups)."""
        self._known_rates: list[list[list[float]]] = []
        self._batch = [torch.zeros_like(t) for t in _tensors(self._example)]
        self._skipped = torch.tensor([m.skipped_steps for m in self._methods], device=self.device)
        for run, each in enumerate(self._methods):
            each._skipped = self._skipped[run]
        self._refused = torch.zeros(runs, device=self.device)
        """1 for the runs whose last step was left out."""
        self._losses = torch.zeros(runs, device=self.device, dtype=torch.promote_types(torch.float32, kept[0][0].dtype))
        self._gradients = [] if self._gaussians else [torch.zeros_like(pack.weights) for pack in self._packs]
        self._sampled = [self._samples(pack) for pack in self._packs]
        self._theta = [
            torch.zeros((runs, self._splits, pack.numel), device=self.device, dtype=pack.runs[0][0].dtype)
            for pack, sampled in zip(self._packs, self._sampled, strict=True)
            if sampled
        ]
        self._tables: list[Tensor] = []
        if self.device.type == "cuda" and self._theta:
            from bsam.engine.sampling_triton import block_table

            self._tables = [
                block_table([slot.index for slot in pack.runs[0]], pack.offsets, pack.sizes, self.device)
                for pack, sampled in zip(self._packs, self._sampled, strict=True)
                if sampled
            ]
        self._seeds = torch.tensor(
            [m._option("seed") if self._theta else 0 for m in self._methods], dtype=torch.int64, device=self.device
        )
        self._torch_steps = [TorchStep(optimizer) for optimizer in self.optimizers]
        self._watch = Watch(self._skipped) if method._option("nonfinite") == "raise" else None

        from bsam.engine.tracing import Captured, compile_function  # here: they take a second to import

        self._fill(_tensors(self._example))
        self._send_rates()
        self._gradient = self._compile_gradient() if compile and not isinstance(method, VOGN) else None
        """Gradients at given weights: compiled by itself, because a step may ask for them twice."""
        flat, self._spec = pytree.tree_flatten(self._inputs())
        function: Callable[..., Any] = torch.no_grad()(self._flat_step)
        if compile:  # means over the splits join what reads their gradients, unless they are very many
            function = compile_function(self._flat_step, flat, unrolled=min(self._splits, 32))

        def whole() -> None:
            self._draw()
            function(*flat)

        self._whole: Callable[[], None] = whole
        self._captures = cuda_graph is True or (cuda_graph == "auto" and compile and self.device.type == "cuda")
        self._captured_steps: tuple[Any, Callable[[], None]] | None = None
        if self._captures:
            self._whole = Captured(whole, self.device, undo=self._snapshot(flat))

    # ------------------------------------------------------------------ a step

    def __call__(self, *batch: Any) -> Tensor:
        """Take one step; returns the mean loss of the first pass (of each run, if there are several)."""
        with deferred(), torch.no_grad():
            return self._step(batch)

    def _step(self, batch: tuple[Any, ...]) -> Tensor:
        stacked = batch if self._stacked else map_tensors(lambda t: t[None], batch)
        if self._stacked:
            checks.rows_of_runs(batch, len(self.optimizers))
        checks.alike(self._methods)
        checks.unchanged(self._fixed, self._methods)
        for method in self._methods:
            method._refuse_if_away("take a step")
        if self._watch is not None:
            self._watch.check()
        if _signature(stacked) != self._shapes or self._present_flags() != self._flags:
            return self._loop(stacked)
        self._adopt()
        self._fill(_tensors(stacked))
        self._send_rates()
        self._whole()
        if self._gradients:
            self._step_optimizers()
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether a step was taken
        if self._watch is not None:
            self._watch.look(self._skipped)
        return self._losses.clone() if self._stacked else self._losses[0].clone()

    def check(self) -> None:
        """Wait for the device, and raise if it left out a step and `nonfinite="raise"`; for the end of training."""
        if self._watch is not None:
            self._watch.look(self._skipped, wait=True)

    def _loop(self, stacked: tuple[Any, ...]) -> Tensor:
        """The step of a batch of another shape: each run by itself. All take it before an error is raised."""
        losses, errors = [], []
        for run, (method, loss_fn) in enumerate(zip(self._methods, self._loss_fns, strict=True)):
            clear_gradients(self.optimizers[run])  # as in a compiled step, they play no part
            try:
                losses.append(method.step(loss_fn, *_of_run(stacked, run)))
            except FloatingPointError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return torch.stack(losses) if self._stacked else losses[0]

    def _flat_step(self, *flat: Tensor) -> list[Tensor]:
        """The step as a function of all it reads; it writes into these tensors."""
        given = pytree.tree_unflatten(list(flat), self._spec)
        outputs = {name: given[name] for name in ("weights", "state", "buffers", "losses", "refused", "gradients")}
        read = {name: given[name] for name in ("theta", "weights", "state", "buffers", "batch", "rates")}
        owners = given["owners"]
        if len(self.optimizers) == 1:
            results = pytree.tree_map(lambda t: t[None], self._one(pytree.tree_map(lambda t: t[0], read), owners))
        else:
            results = torch.vmap(lambda each: self._one(each, owners), randomness="different")(read)
        given["skipped"].add_(results["refused"].long())
        for name, target in outputs.items():
            for to, value in zip(pytree.tree_leaves(target), pytree.tree_leaves(results[name]), strict=True):
                to.copy_(value)
        return []

    def _one(self, given: dict[str, Any], owners: dict[int, Tensor]) -> dict[str, Any]:
        """The step of one run, as formulas."""
        method = self._methods[0]
        slots: list[Slot] = []
        for number, (pack, index, weights, state) in enumerate(
            zip(self._packs, self._group_of, given["weights"], given["state"], strict=True)
        ):
            own = {name: value.clone() for name, value in state.items()}  # written to, as is the parameter
            group = self._group(method.param_groups[index], given["rates"][index])
            first = pack.runs[0][0].index
            slots.append(PackSlot(first, weights.clone(), group, weights, own, owners=owners.get(number)))
        drawn = iter(given["theta"])
        theta = [
            next(drawn) if sampled else slot.mean.expand(self._splits, *slot.mean.shape)
            for slot, sampled in zip(slots, self._sampled, strict=True)
        ]
        buffers = {name: b.expand(self._splits, *b.shape) for name, b in given["buffers"].items()}
        cut = [t.unflatten(0, (self._splits, -1)) for t in given["batch"]]
        loss_module = LossModule(self.modules[0], self._loss_fns[0])
        losses, statistics, moved = probe_stack(
            method, slots, loss_module, self._unpack, self._pack, theta, self._part, cut, buffers, self._gradient
        )  # fmt: skip
        finite = all_finite([*losses, *(t for tensors in statistics.values() for t in tensors)])
        clip_gradient(statistics["gradient"], method._option("max_grad_norm"))
        gradients = []
        if isinstance(method, GaussianOptimizer):
            method._update(slots, statistics, finite)
        else:
            gradients = [g.to(slot.mean.dtype) for g, slot in zip(statistics["gradient"], slots, strict=True)]
        return {
            "weights": [slot.parameter for slot in slots],
            "state": [slot.state for slot in slots],
            "buffers": {name: torch.where(finite, moved[name], b) for name, b in given["buffers"].items()},
            "losses": losses[0],
            "refused": (~finite).float(),
            "gradients": gradients,
        }

    def _compile_gradient(self) -> Program:
        """`GradAtStack.evaluate_all`, for one run, or for all of them under vmap."""
        from bsam.engine.program import Program

        def stack(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [t[:, None].expand(-1, self._splits, *t.shape[1:]) for t in tensors]

        weights = stack(pack.weights.to(pack.runs[0][0].dtype) for pack in self._packs)
        rows = [t.reshape(len(t), self._splits, -1, *t.shape[2:]) for t in self._batch]
        buffers = dict(zip(self._buffers, stack(self._buffers.values()), strict=True))
        loss_module = LossModule(self.modules[0], self._loss_fns[0])
        grad_at = GradAtStack(loss_module, self._unpack, self._pack, self._part, [], {}, lambda _: frozenset())
        if len(self.optimizers) == 1:
            arguments = pytree.tree_map(lambda t: t[0], (weights, rows, buffers))
            return Program(grad_at.evaluate_all, arguments, stacked=False)
        together = torch.vmap(grad_at.evaluate_all, randomness="different")
        return Program(together, (weights, rows, buffers), stacked=True)

    def _unpack(self, weights: list[Tensor]) -> dict[str, Tensor]:
        return {
            name: w for pack, flat in zip(self._packs, weights, strict=True) for name, w in pack.unpack(flat).items()
        }

    def _pack(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        left = iter(gradients)
        return [pack.pack([next(left) for _ in pack.names], pack.runs[0][0].dtype) for pack in self._packs]

    def _group(self, group: dict[str, Any], rates: Tensor) -> dict[str, Any]:
        """The group with the options that may change read from the device; `rates` has them in its last dimension."""
        values = dict(zip((*RATES, "beta1", "beta2"), rates.unbind(-1), strict=True))
        betas = {"betas": (values["beta1"], values["beta2"])} if "betas" in group else {}
        return {**group, **{name: values[name] for name in RATES if name in group}, **betas}

    # ------------------------------------------------------------------ what a step reads

    def _inputs(self) -> dict[str, Any]:
        return {
            "theta": self._theta,
            "weights": [pack.weights for pack in self._packs],
            "state": [pack.state if self._gaussians else {} for pack in self._packs],
            "buffers": self._buffers,
            "batch": self._batch,
            "rates": self._rates,
            "owners": self._owners,
            "losses": self._losses,
            "skipped": self._skipped,
            "refused": self._refused,
            "gradients": self._gradients,
        }

    @property
    def _gaussians(self) -> list[GaussianOptimizer]:
        """The optimizers whose update is traced too; torch's make their own step with the gradient."""
        return [method for method in self._methods if isinstance(method, GaussianOptimizer)]

    def _samples(self, pack: Pack) -> bool:
        group = pack.runs[0][0].group
        return bool(self._gaussians and group["sample"] and group.get("sample_noise", True))

    def _draw(self) -> None:
        """Put the weights of the first pass into their buffers."""
        places = [place for place, is_sampled in enumerate(self._sampled) if is_sampled]
        for i, (place, theta) in enumerate(zip(places, self._theta, strict=True)):
            pack = self._packs[place]
            if theta.device.type == "cuda" and theta.dtype == torch.float32:
                from bsam.engine.sampling_triton import sample_posterior

                method, index = self._gaussians[0], self._group_of[place]
                rates = self._rates[:, index, None].to(theta.dtype)  # (runs, 1, ...): goes with (runs, elements)
                group = self._group(method.param_groups[index], rates)
                owners = self._owners.get(place)
                s = method._noise_precision(PackSlot(0, pack.weights, group, pack.weights, pack.state, owners=owners))
                N, steps = method.effective_num_data, pack.state["step"]
                sample_posterior(theta, pack.weights, s, self._tables[i], steps, self._seeds, N)
                continue
            for run, (own, slots) in enumerate(zip(self._gaussians, pack.runs, strict=True)):
                for slot, start, size in zip(slots, pack.offsets, pack.sizes, strict=True):
                    for k in range(self._splits):
                        theta[run, k, start : start + size].copy_(own._theta(slot, k).flatten())

    def _fill(self, tensors: list[Tensor]) -> None:
        for buffer, tensor in zip(self._batch, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)

    def _send_rates(self) -> None:
        values = [[_rates_of(group) for group in method.param_groups] for method in self._methods]
        if values != self._known_rates:
            self._rates.copy_(torch.tensor(values, dtype=torch.float64))
            self._lr.copy_(self._rates[..., RATES.index("lr")])
            self._known_rates = values

    # ------------------------------------------------------------------ packs and buffers are the model's own

    def _register(self) -> None:
        for run, method in enumerate(self._gaussians):
            method._keep([slot for pack in self._packs for slot in pack.runs[run]])
        self._addresses = [slot.parameter.data_ptr() for _, slot, _ in self._places]

    def _adopt(self) -> None:
        """Take over weights, states, groups and buffers that were replaced since the last step, by loading say."""
        gaussians = self._gaussians
        same = all(
            slot.parameter.data_ptr() == address
            and slot.group is self._methods[run].param_groups[group]
            and (not gaussians or gaussians[run].state[slot.parameter] is slot.state)
            for (run, slot, group), address in zip(self._places, self._addresses, strict=True)
        )
        if not same:
            for run, slot, group in self._places:
                slot.group = self._methods[run].param_groups[group]
                if gaussians:
                    state = gaussians[run].state.get(slot.parameter)
                    slot.state = dict(state or gaussians[run]._fresh_state(slot.parameter, slot.group))
            for pack in self._packs:
                pack.adopt()
            self._register()
        for owner, name, view in self._buffer_views:
            now = owner._buffers[name]
            if now is not view and now is not None and view is not None:
                view.copy_(now)
                owner._buffers[name] = view

    def _adopt_buffers(self) -> None:
        """Stack the buffers of all models, and make them views of the stacks."""
        owners = [
            [
                (f"module.{prefix}{'.' if prefix else ''}{name}", owner, name, b)
                for prefix, owner in module.named_modules()
                for name, b in owner._buffers.items()
                if b is not None
            ]
            for module in self.modules
        ]
        self._buffers = {}
        for column in zip(*owners, strict=True):
            stack = torch.stack([b for _, _, _, b in column])
            self._buffers[column[0][0]] = stack
            for run, (_, owner, name, _) in enumerate(column):
                owner._buffers[name] = stack[run]
        self._buffer_views = [(owner, name, owner._buffers[name]) for column in owners for _, owner, name, _ in column]

    def _snapshot(self, flat: list[Tensor]) -> Callable[[], None]:
        saved = [t.clone() for t in flat]

        def undo() -> None:
            for tensor, value in zip(flat, saved, strict=True):
                tensor.copy_(value)

        return undo

    # ------------------------------------------------------------------ torch's optimizers, and steps left out

    def _step_optimizers(self) -> None:
        """One step of each run's torch optimizer with the gradients of the traced part."""
        signatures = [step.signature(self.device) for step in self._torch_steps] if self._captures else [None]
        if None in signatures:
            self._step_each()
            return
        if self._captured_steps is None or self._captured_steps[0] != signatures:
            from bsam.engine.tracing import Captured

            with ExitStack() as stack:
                for step, rates in zip(self._torch_steps, self._lr, strict=True):
                    stack.enter_context(step.reading(rates))
                written = [t for step in self._torch_steps for t in step.state()]
                self._captured_steps = signatures, Captured(self._step_each, self.device, self._snapshot(written))
        self._captured_steps[1]()

    def _step_each(self) -> None:
        for run, step in enumerate(self._torch_steps):
            gradients = [
                (slot.parameter, pack.view(gradient, run, place))
                for pack, gradient in zip(self._packs, self._gradients, strict=True)
                for place, slot in enumerate(pack.runs[run])
            ]
            step(gradients, self._refused[run])

    def _present_flags(self) -> list[bool]:
        """Whether each module trains and each parameter takes a gradient."""
        trains = [owner.training for owner in self._flagged]
        return trains + [slot.parameter.requires_grad for _, slot, _ in self._places]


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
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):  # a cache would hold on to old weights
            return loss_fn(*batch)

    return under_autocast


def _rates_of(group: dict[str, Any]) -> list[float]:
    """The rates of a group, and its two betas; 0 for those that it does not have."""
    betas = group.get("betas", (0.0, 0.0))
    return [float(group.get(name, 0.0)) for name in RATES] + [float(beta) for beta in betas]


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def _signature(batch: Any) -> Any:
    """What a batch must have in common with the example: structure, shapes and types."""
    return map_tensors(lambda t: (tuple(t.shape), t.dtype), tuple(batch))


def _of_run(stacked: tuple[Any, ...], run: int) -> tuple[Any, ...]:
    of_run: tuple[Any, ...] = map_tensors(lambda t: t[run], stacked)
    return of_run


def _position(group: dict[str, Any], groups: list[dict[str, Any]]) -> int:
    return next(i for i, each in enumerate(groups) if each is group)
