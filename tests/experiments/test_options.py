"""Options that several commands share."""

import typer

from bsam.experiments.commands import app


def test_options_that_commands_share_are_the_same_in_all():
    commands = typer.main.get_command(app).commands
    shared = {name: {option.name: option for option in commands[name].params} for name in ("reproduce", "tune")}
    assert {"jobs", "dry_run", "runs", "data", "device", "save_minutes", "stack_size", "precision"} <= set(
        shared["tune"]
    )
    for name in ("reproduce", "sweep", "ablate", "tune"):
        found = {option.name: option for option in commands[name].params}
        assert name == "tune" or {"seeds", "scale", "records"} <= set(found)
        for key in set(found) & set(shared["reproduce"]):
            one, two = found[key], shared["reproduce"][key]
            assert (one.help, one.default, one.opts) == (two.help, two.default, two.opts)
