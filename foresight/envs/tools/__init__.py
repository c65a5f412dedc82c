"""Conversations with an environment: tools that a language model calls, and what comes back."""
