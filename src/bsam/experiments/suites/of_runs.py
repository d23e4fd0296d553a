"""Evaluating suites: predictions for their inputs are made once, kept beside the run, and rated into its record.

`record["suites"][SUITE][NAME]` has the numbers, where NAME is that of an evaluation: the number of samples, and the
temperature if it is not the run's own. The predictions are `RUN/suites/SUITE-NAME/SET.safetensors`, so that ensembles
can be made of runs later.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

import bsam
from bsam.experiments.config import Config, from_mapping
from bsam.experiments.data import Dataset, load
from bsam.experiments.evaluate import belongs, evaluate, evaluation_name, prepared, sha256_of
from bsam.experiments.methods import predict
from bsam.experiments.record import environment, read_json, write_json
from bsam.experiments.runs import choose_device, remembered_data
from bsam.experiments.suites.registry import SUITES, choose
from bsam.files import locked

__all__ = ["Results", "check_run", "check_suites", "evaluate_suites"]

Results = dict[str, dict[str, dict[str, Any]]]
"""By suite and evaluation: the numbers, as `bsam.experiments.suites.ratings` returns them."""
_BATCHES = (2500, 1000, 500)
"""Images per batch: the largest for which a pass has at most `_PASS` inputs. All divide 10,000: one compiled pass."""
_PASS = 20_000


_kept: dict[tuple[str, str, str, Path | None], dict[str, Tensor]] = {}
"""The sets of the suites that were used last, for the next run."""


def _images(suite: str, known: Dataset, folder: Path | None) -> dict[str, Tensor]:
    """Return the sets of a suite. They are made once for a data set, until another one is asked for."""
    place = (known.info.name, str(known.device), folder)
    for other in [key for key in _kept if key[1:] != place]:
        del _kept[other]
    if (suite, *place) not in _kept:
        _kept[suite, *place] = SUITES[suite].images(known, folder)
    return _kept[suite, *place]


def check_suites(suites: Sequence[str], known: Dataset, folder: Path | None) -> None:
    """Load everything that suites need, so that a missing or wrong file is an error before anything is trained."""
    for name in suites:
        if not SUITES[name].keeps_labels:  # those are made of the test images, which are loaded
            _images(name, known, folder)
        SUITES[name].about(known, folder)


def check_run(folder: Path, suites: Iterable[str], data: Path | None = None) -> None:
    """Raise if suites do not fit a finished run, or if a file that they need is missing or wrong."""
    if not (folder / "record.json").is_file():
        return  # `evaluate` says what is missing
    dataset = from_mapping(read_json(folder / "record.json")["config"]).dataset
    where = data or remembered_data(folder)
    check_suites(choose(suites, dataset), load(dataset, where), where)


def evaluate_suites(
    folder: Path,
    suites: Iterable[str],
    *,
    samples: Iterable[int] | None = None,
    temperature: float | None = None,
    device: str | None = None,
    data: Path | None = None,
    seed: int | None = None,
    again: bool = False,
    prepare: Callable[[str, str, int, torch.device, Path | None], tuple[Dataset, nn.Module]] = prepared,
) -> Results:
    """Evaluate suites of a finished run, and write their numbers into its record; what is recorded is not made again.

    Args:
        folder: The folder of a finished run.
        suites: Names of `SUITES`, or `shift` for all that fit.
        samples: Numbers of samples. The default is in the run's settings; a suite may take fewer, see `Suite.counts`.
        temperature: As for `bsam.experiments.evaluate.evaluate`; the other arguments, too.
        device: Where to predict.
        data: Folder of the data sets.
        seed: Seed of the samples.
        again: Make all predictions again.
        prepare: Returns data and network.

    Returns:
        The numbers, by suite and evaluation.
    """
    path = folder / "record.json"
    if not path.is_file():
        evaluate(folder)  # which says what is missing
    record = read_json(path)
    trained = from_mapping(record["config"])
    chosen = choose(suites, trained.dataset)
    where = data or remembered_data(folder)
    seed = record["seed"] if seed is None else seed
    given = None if samples is None else list(samples)
    loaded = functools.cache(
        lambda: prepare(trained.dataset, trained.model, trained.validation, choose_device(device), where)
    )
    origin = {"seed": seed, "posterior_sha256": sha256_of(folder / "posterior.safetensors")}
    wanted = {
        suite: {
            evaluation_name(count, temperature, trained): count
            for count in (SUITES[suite].counts([trained.num_samples]) if given is None else given)
        }
        for suite in chosen
    }
    names = {name: count for each in wanted.values() for name, count in each.items()}
    missing = {
        (suite, name): count
        for suite in chosen
        for name, count in wanted[suite].items()
        if again or not _is_made(folder, suite, name, record, origin)
    }
    if missing:
        check_suites([suite for suite in chosen if any(suite == each for each, _ in missing)], loaded()[0], where)
    tests = {name: folder / f"predictions-test-{name}.safetensors" for name in names}
    known = record["evaluations"].get("test", {})
    unpredicted = [
        count for name, count in names.items() if again or not belongs(tests[name], origin, known.get(name, {}))
    ]
    if unpredicted:
        evaluate(
            folder,
            samples=unpredicted,
            temperature=temperature,
            device=device,
            data=data,
            seed=seed,
            again=again,
            prepare=lambda *_: loaded(),
        )
    for (suite, name), count in missing.items():
        dataset, model = loaded()
        config = trained if temperature is None else dataclasses.replace(trained, temperature=temperature)
        sets = _predict_sets(suite, dataset, model, folder, config, count, seed, where)
        test = bsam.Predictions.load(tests[name])
        numbers = SUITES[suite].rate(test, sets, SUITES[suite].about(dataset, where))
        with locked(folder / ".record.json.lock"):
            _keep(sets, folder / "suites" / f"{suite}-{name}")
            content = read_json(path)
            content.setdefault("suites", {}).setdefault(suite, {})[name] = {
                **numbers,
                **origin,
                "environment": environment(dataset.device),
            }
            write_json(path, content)
    found = read_json(path)["suites"]
    return {suite: {name: found[suite][name] for name in wanted[suite]} for suite in chosen}


def _is_made(folder: Path, suite: str, name: str, record: Mapping[str, Any], origin: Mapping[str, Any]) -> bool:
    known = record.get("suites", {}).get(suite, {}).get(name, {})
    return (folder / "suites" / f"{suite}-{name}").is_dir() and all(known.get(k) == v for k, v in origin.items())


def _predict_sets(
    suite: str,
    dataset: Dataset,
    model: nn.Module,
    folder: Path,
    config: Config,
    count: int,
    seed: int,
    where: Path | None,
) -> dict[str, bsam.Predictions]:
    """Predict all sets of a suite in one go, and cut the result into the sets."""
    images = _images(suite, dataset, where)
    if not images:
        return {}
    labels = dataset.test[1] if SUITES[suite].keeps_labels else None
    size = next((size for size in _BATCHES if count * size <= _PASS), _BATCHES[-1])

    def batches() -> Iterator[Any]:
        for each in images.values():
            for start in range(0, len(each), size):
                x = dataset.normalise(each[start : start + size])
                yield x if labels is None else (x, labels[start : start + size])

    posterior = bsam.load_posterior(folder / "posterior.safetensors")
    total = sum(len(each) for each in images.values())
    whole = predict(config, model, posterior, batches(), num_samples=count, seed=seed, num_examples=total)
    sets, start = {}, 0
    for name, each in images.items():
        sets[name] = _rows(whole, slice(start, start + len(each)))
        start += len(each)
    return sets


def _rows(whole: bsam.Predictions, rows: slice) -> bsam.Predictions:
    return dataclasses.replace(
        whole,
        log_probs=whole.log_probs[rows],
        mutual_information=whole.mutual_information[rows],
        labels=None if whole.labels is None else whole.labels[rows],
        energy=None if whole.energy is None else whole.energy[rows],
    )


def _keep(sets: Mapping[str, bsam.Predictions], folder: Path) -> None:
    """Write the predictions of all sets into a folder that appears when it is complete."""
    folder.parent.mkdir(exist_ok=True)
    temporary = Path(mkdtemp(dir=folder.parent, prefix="."))
    try:
        for name, predictions in sets.items():
            predictions.save(temporary / f"{name}.safetensors")
        temporary.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
