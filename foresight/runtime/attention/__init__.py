"""Attention as a picture: where a model or a run looks, what happens without it, drawings and a page."""
