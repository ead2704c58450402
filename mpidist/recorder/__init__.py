"""The flight recorder: each rank records its calls where other ranks and tools can read them."""
