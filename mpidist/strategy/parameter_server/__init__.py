"""`ParameterServerStrategy`, and workers that join it."""
