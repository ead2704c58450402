"""The order of calls: all ranks make the same ones, and differences are errors."""
