"""The families of optimizers: each is one kernel, and the function that makes an optimizer of it."""
