"""The synchronous step of an optimizer: its plans, and the sums and updates that it makes."""
