"""Compositions of other ops as one compiled loop, for small networks on a CPU, where calls take longer than arithmetic.

Each has a readable twin, which computes the same with the other ops, and a test that compares the two.
"""
