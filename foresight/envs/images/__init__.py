"""Images with labels."""
