"""The flight recorder: what a rank notes of its calls, for the others to read."""
