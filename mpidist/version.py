"""The version, in the one place from which package, programs and files take it."""

__version__ = "0.1.0"
