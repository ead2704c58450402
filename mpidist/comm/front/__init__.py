"""The front of all collectives: checks of arguments, conversions, the call log, packing, and sparse sums."""
