"""Values of actions: Q-learning with networks."""
