"""The table of what the adapters cost."""

from tools import trainers


def test_the_loop_has_times_and_a_trainer_also_what_it_costs():
    record = {
        "ms": {"loop": {"Adam": 5.0, "BSAM": 15.0}, "Accelerate": {"Adam": 5.5, "BSAM": 15.8}},
        "extra": {"Accelerate": {"beside": "loop", "median": -0.0003, "interval": [-0.01, 0.03]}},
        "over_one_call": {"Accelerate": {"beside": "loop", "median": 0.02, "interval": [0.01, 0.03]}},
    }
    header, _, loop, trainer = trainers.markdown(record).splitlines()
    assert header.count("|") == loop.count("|") == trainer.count("|")
    assert loop == "| loop | 5.00 | 15.00 |  |  |  |"
    assert trainer == "| Accelerate | 5.50 | 15.80 | 0.0% (-1.0%, 3.0%) | loop | 2.0% (1.0%, 3.0%) |"
