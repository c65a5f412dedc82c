"""Search: look ahead with a model, and learn from what was found."""
