"""Policy gradients."""
