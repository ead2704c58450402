"""Calls of adapters of frameworks on a strategy: nests of any library, on any one thread, in steps."""
