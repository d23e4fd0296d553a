"""Search: Optuna proposes settings between the values of a grid, for `bsam tune --search`.

A try is a trial of Optuna. Its study is a journal file beside the runs, so that many machines may ask at once. After a
third of its epochs a try is rated on the validation part. It is pruned if its NLL is above the median of the tries that
were trained to their end. The test part is never predicted.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import bsam
from bsam.experiments.data import plain_batches
from bsam.experiments.methods import predict
from bsam.experiments.models import make_model
from bsam.experiments.options import Work
from bsam.experiments.record import write_json
from bsam.experiments.reproduce.carry_out import Piece, run_pieces
from bsam.experiments.reproduce.execute import execute
from bsam.experiments.reproduce.machines import check_options, machines
from bsam.experiments.reproduce.tuning import Tuning, collect_tries, note_divergence, plan_tries
from bsam.experiments.runs import RunBusyError
from bsam.experiments.stacks import Stack
from bsam.experiments.trainer import Trainer
from bsam.files import locked

if TYPE_CHECKING:
    import optuna

__all__ = ["Search", "carry_out_search", "collect_search"]

_SHARE = 1 / 3
"""Share of the epochs after which a try may be pruned."""
_NEVER_PRUNED = 4
"""Number of first tries that are trained to their end."""
_DIGITS = 3
"""Significant digits of a proposed number."""


class _PrunedError(Exception):
    """The NLL of the try is above the median at this epoch."""

    def __init__(self, epochs: int, nll: float) -> None:
        super().__init__(f"pruned after {epochs} epochs")
        self.epochs, self.nll = epochs, nll


@dataclass(frozen=True)
class Search:
    """A search within a grid."""

    tuning: Tuning
    count: int
    """Number of tries."""
    runs: Path
    """Folder of the runs; the study is in it, too."""

    @property
    def folder(self) -> Path:
        """The folder of the study: that of the tries."""
        return self.runs / self.tuning.folder

    @property
    def journal(self) -> Path:
        """The file of the study."""
        return self.folder / "search.journal"

    def study(self) -> optuna.Study:
        """Open the study, which is made if it is not there. A study of another grid is an error."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(self.journal))),
            study_name=self.tuning.name,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=_NEVER_PRUNED),
            load_if_exists=True,
        )
        origin = {"base": self.tuning.base, "validation": self.tuning.validation, "grid": list(self.tuning.grid)}
        if "origin" not in study.user_attrs:
            study.set_user_attr("origin", origin)
        elif study.user_attrs["origin"] != origin:
            raise ValueError(f"{self.journal} belongs to another grid: move it away, or choose another --runs.")
        return study

    def tried(self, *states: str) -> list[optuna.trial.FrozenTrial]:
        """Return the tries in these states; without a study there are none."""
        return _tries(self.study(), *states) if self.journal.exists() else []

    def locked(self) -> AbstractContextManager[None]:
        """Let one process at a time look at the study and change it."""
        return locked(self.folder / ".search.lock")

    def ask(self, study: optuna.Study) -> optuna.trial.FrozenTrial | None:
        """Let Optuna propose a try, or return None if there are enough. One process asks at a time."""
        import optuna

        with self.locked():
            trials = study.get_trials()
            for trial in trials:
                if trial.state.name == "RUNNING" and "settings" not in trial.user_attrs:  # its process died here
                    study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if sum("settings" in trial.user_attrs for trial in trials) >= self.count:
                return None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                # A proposal depends on the tries so far alone. Those that run count as bad: no two are alike.
                study.sampler = optuna.samplers.TPESampler(seed=len(trials), constant_liar=True)
            asked = study.ask()
            asked.set_user_attr("settings", propose(asked, [part for part in self.tuning.grid if all(part.values())]))
            return study.get_trials()[asked.number]

    def tell(self, study: optuna.Study, number: int, nll: float) -> bool:
        """Tell Optuna the NLL of a try, infinite if it was pruned; return False if another process has told it."""
        import optuna

        result: dict[str, Any] = {"values": nll}
        if not math.isfinite(nll):
            result = {"state": optuna.trial.TrialState.PRUNED}
        with self.locked():
            if study.get_trials()[number].state.is_finished():
                return False
            study.tell(number, **result)
            return True

    def alone(self, trial: optuna.trial.FrozenTrial) -> Tuning:
        """Return the grid of one try."""
        settings = {name: [value] for name, value in trial.user_attrs["settings"].items()}
        return dataclasses.replace(self.tuning, grid=(settings,))


def _tries(study: optuna.Study, *states: str) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in study.get_trials() if trial.state.name in states and "settings" in trial.user_attrs]


def propose(trial: optuna.Trial, grid: Sequence[dict[str, list[Any]]]) -> dict[str, Any]:
    """Let a trial choose a part of the grid, and settings in it.

    A number is chosen between the lowest and the highest value, on a logarithmic scale if they are positive. Whole
    numbers, words and lists are chosen among the values.
    """
    part = 0 if len(grid) == 1 else trial.suggest_categorical("part", range(len(grid)))
    settings: dict[str, Any] = {}
    for name, values in grid[part].items():
        key = name if len(grid) == 1 else f"{part}/{name}"
        if any(isinstance(value, float) for value in values) and len(set(values)) > 1:
            low, high = float(min(values)), float(max(values))
            number = trial.suggest_float(key, low, high, log=low > 0)
            settings[name] = min(high, max(low, float(f"{number:.{_DIGITS}g}")))
        else:
            settings[name] = values[trial.suggest_categorical(key, range(len(values)))]
    return settings


# ------------------------------------------------------------------ a try


def work_on_try(slot: int, report: Callable[[float], None], *, search: Search, stacked: bool, **options: Any) -> None:
    """Go on with a try that nobody is working on, or ask for a new one, and complete it.

    Raises:
        RunBusyError: Other processes are at all tries that are left.
    """
    study, busy = search.study(), None
    for trial in _candidates(search, study):
        try:
            if _complete(search, study, trial, report, stacked, options):
                return
        except RunBusyError as error:
            busy = error
    if busy is not None:
        raise busy


def _candidates(search: Search, study: optuna.Study) -> Iterator[optuna.trial.FrozenTrial]:
    """Yield the tries that have begun, and then new ones."""
    yield from _tries(study, "RUNNING")
    while (trial := search.ask(study)) is not None:
        yield trial


def _complete(
    search: Search,
    study: optuna.Study,
    frozen: optuna.trial.FrozenTrial,
    report: Callable[[float], None],
    stacked: bool,
    options: dict[str, Any],
) -> bool:
    """Train and rate a try, as far as this is not done; return whether this process told Optuna the result."""
    import optuna

    tuning = search.alone(frozen)
    trial = optuna.trial.Trial(study, frozen._trial_id)  # Optuna has no public way to go on with a trial
    left = plan_tries(tuning, search.runs).tasks
    groups = [left] if stacked and left else [(task,) for task in left]
    rated = len(left) == tuning.seeds  # a try is pruned by its first seed, or by the seeds that are trained together
    for index, group in enumerate(groups):

        def show(share: float, before: int = index) -> None:
            report((before + share) / len(groups))

        watch = functools.partial(_watch, trial) if rated and index == 0 else _no_watch
        try:
            execute(group, show, on_divergence=note_divergence, watch=watch, **options)
        except _PrunedError as pruned:
            for task in left:
                task.folder.mkdir(parents=True, exist_ok=True)
                write_json(task.folder / "pruned.json", {"pruned": {"epochs": pruned.epochs, "nll": pruned.nll}})
            break
    (tried,) = collect_tries(tuning, search.runs, "")["tries"]
    return search.tell(study, frozen.number, tried["nll"])


def _no_watch(stack: Stack) -> None:
    pass


def _watch(trial: optuna.Trial, stack: Stack) -> None:
    """Rate the runs of a stack, once, after a share of their epochs; raise if they are pruned."""
    first = stack.trainers[0]
    epoch = max(1, round(_SHARE * first.config.total_epochs))
    if first.batch != 0 or first.epoch != epoch or epoch == first.config.total_epochs:
        return
    known = trial.storage.get_trial(trial._trial_id).intermediate_values  # of an attempt that was killed
    nll = known[epoch] if epoch in known else statistics.fmean(map(validation_nll, stack.trainers))
    if epoch not in known:
        trial.report(nll, epoch)
    if trial.should_prune():
        raise _PrunedError(epoch, nll)


def validation_nll(trainer: Trainer) -> float:
    """Return the NLL on the validation part, of the posterior that the run has now. Training is not disturbed."""
    config, data = trainer.config, trainer.dataset
    model = make_model(config.model, num_classes=data.num_classes, image_shape=data.image_shape, seed=0)
    # SWAG has no posterior before its first snapshots
    posterior = bsam.PointMass.from_model(trainer.model) if config.swag_epochs else trainer.posterior()
    batches = plain_batches(data, "validation", batch_size=500)
    predictions = predict(
        config, model.to(data.device), posterior, batches, num_samples=config.num_samples, seed=trainer.seed
    )
    return bsam.metrics.summary(predictions, num_bootstrap=0).nll


# ------------------------------------------------------------------ all tries


def carry_out_search(search: Search, options: Work) -> bool:
    """Complete all tries of a search; return whether one of them failed."""
    check_options(options)
    if importlib.util.find_spec("optuna") is None:
        raise ModuleNotFoundError(
            "--search needs the package optuna, which is not installed. In the folder of bsam's source, write: "
            "pip install '.[tune]'"
        )
    if options.storage is not None:
        raise ValueError("--search keeps its study beside the runs: leave --storage out, and share the folder --runs.")
    done = len(search.tried("COMPLETE", "PRUNED"))
    console = Console(stderr=True)
    what = f"{max(0, search.count - done)} tries to do, {done} recorded; each has {search.tuning.epochs} epochs"
    console.print(f"{what} and {search.tuning.seeds} seeds.", highlight=False)
    if options.dry_run or done >= search.count:
        return False
    with machines(options, small=False, folders=[search.folder]) as found:
        search.folder.mkdir(parents=True, exist_ok=True)
        work = functools.partial(work_on_try, search=search, stacked=found.stacked, **found.settings)
        pieces = [Piece(f"try {slot + 1}", 1, slot) for slot in range(done, search.count)]
        return run_pieces(console, pieces, functools.partial(found.run_all, work=work))


def collect_search(search: Search, command: str) -> dict[str, Any]:
    """Make one record of all tries, as of a grid; it also says how they were proposed."""
    trials = search.tried("RUNNING", "COMPLETE", "PRUNED")
    tuning = dataclasses.replace(
        search.tuning, grid=tuple(part for trial in trials for part in search.alone(trial).grid)
    )
    about = {"by": "Optuna, TPE", "pruned_after": _SHARE, "between": list(search.tuning.grid)}
    return {**collect_tries(tuning, search.runs, command), "search": about}
