"""The coordinator as the home of served variables."""
