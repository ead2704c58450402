"""Models under parameter servers: the chief's model, its copies on workers, tables of embeddings and the optimizer."""
