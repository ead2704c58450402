"""Tests of `mpidist.parallel`."""
