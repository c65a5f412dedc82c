"""Time and machines: runs, logs, checkpoints, evaluation."""
