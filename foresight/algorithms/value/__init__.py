"""Value-based methods: Q-learning with networks."""
