"""Pure tensor functions: they import torch and nothing of ours."""
