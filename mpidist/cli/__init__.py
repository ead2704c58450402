"""The command line: `mpidist COMMAND`."""
