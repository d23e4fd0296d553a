"""Experiments: everything with files, flags or plots. Uses the public names of `bsam` alone; nothing imports it."""
