"""The order of calls: all ranks make the same calls, and differences are errors."""
