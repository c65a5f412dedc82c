"""Learning live from use: a server whose turns are collected, scored and trained on while it serves."""
