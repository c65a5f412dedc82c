"""PDDL: planning problems in the language of the planning competitions, and as environments."""
