"""A model of a job around the product's own state machines, and its exploration: no MPI, no time, no threads."""
