"""What acts in the open: language models that use tools."""
