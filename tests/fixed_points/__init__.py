"""Whole algorithms on MDPs whose solution is known: what they converge to is compared with a linear solve."""
