"""The choice of a backend: what is available, what is fastest, what the user asked for."""
