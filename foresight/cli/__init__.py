"""The command `foresight`."""
