"""One file is one paper."""
