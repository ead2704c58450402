"""The memory of a server: variables, and slots for the updates that workers push."""
