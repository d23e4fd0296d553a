"""Adapters to trainers: one file per library, which is imported only if you import the file."""
