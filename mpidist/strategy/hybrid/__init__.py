"""`HybridStrategy`: groups of ranks that are in sync within, and asynchronous between."""
