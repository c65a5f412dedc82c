"""Language-model algorithms: actions are tokens."""
