"""Saves in the background: each rank copies its share, and a thread writes it while the program continues."""
