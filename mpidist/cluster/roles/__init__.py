"""The roles of ranks: who trains, coordinates, serves or evaluates."""
