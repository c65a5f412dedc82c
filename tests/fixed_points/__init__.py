"""Whole algorithms on worlds whose solution is known: what they converge to is compared with a linear solve."""
