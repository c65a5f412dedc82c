"""Planning by search in problems of PDDL: breadth-first, A*, greedy best-first, and Fast Downward."""
