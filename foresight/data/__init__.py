"""Data: trajectories, replay, token batches and language datasets."""
