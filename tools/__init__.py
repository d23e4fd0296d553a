"""Tools for developers of this repository; they are not part of the package."""
