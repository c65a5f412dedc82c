"""Looking ahead with a model."""
