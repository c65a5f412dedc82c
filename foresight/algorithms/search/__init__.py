"""Search with a model, and networks trained on its results."""
