"""The input of `fit`: which rows of which batches this replica reads."""
