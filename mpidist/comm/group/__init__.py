"""Groups of ranks: communicators, the resources that are freed with them, and agreement between ranks."""
