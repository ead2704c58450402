"""The families of optimizers: each module has one kernel, and the function that makes its optimizer."""
