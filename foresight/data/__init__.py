"""What flows: trajectories, replay, token batches."""
