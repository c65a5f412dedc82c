"""Policies of robots that imitate demonstrations by whole chunks of actions. One file per method."""
