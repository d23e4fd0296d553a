"""The paper's settings as data."""
