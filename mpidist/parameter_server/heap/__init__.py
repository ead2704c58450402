"""The memory of a server: variables, and slots for pushes."""
