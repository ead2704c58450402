"""The coordinator's side of variables on servers: it makes, reads and writes them."""
