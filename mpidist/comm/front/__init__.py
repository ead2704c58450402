"""The front of all collectives: checks, conversions, the call log, packing, sparse sums."""
