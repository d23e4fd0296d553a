"""The figures of sweeps and ablations."""

import pytest

from bsam.experiments.reproduce.plan import Places, make_plan
from bsam.experiments.reproduce.studies import collect
from bsam.experiments.reproduce.study_figure import draw_study
from tests.experiments.reproduce.records import write_record
from tests.experiments.reproduce.test_studies import STUDIES


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_drawn(name, tmp_path):
    study = STUDIES[name]
    places = Places(tmp_path, tmp_path, tmp_path)
    for task in make_plan(study.wanted, seeds=2, scale="full", places=places).tasks:
        options = {"preset_name": task.preset, "config": task.config, "changes": task.changes, "samples": task.samples}
        write_record(tmp_path, task.name, task.seed, **options)
    assert make_plan(study.wanted, seeds=2, scale="full", places=places).tasks == ()
    record = collect(study, "full", tmp_path, study.command)
    lengths = [len(points) for points in study.series.values()]
    assert [len(curve["x"]) for curve in record["series"]] == lengths
    path = draw_study(record, tmp_path / "new" / "figure.png")
    assert path.stat().st_size > 10_000
