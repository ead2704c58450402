"""Programs that use PyTorch."""
