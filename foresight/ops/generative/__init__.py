"""The math of generative models: what samplers of actions do at each step."""
