"""Planners of the seven domains, written by hand: programs for the sandbox, which `envs.pddl.programs` runs."""
