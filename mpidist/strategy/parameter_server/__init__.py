"""`ParameterServerStrategy`, `Server`, and workers that join a running job."""
