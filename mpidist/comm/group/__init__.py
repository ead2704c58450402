"""Groups of ranks: communicators, what belongs to them, and agreement in them."""
