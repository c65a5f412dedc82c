"""Errands: a disc with inertia brings an object to another one, through rooms with a locked door, as words ask it to.

`rules` is one episode, `picture` what is seen of it, `script` a solution without learning; `pointing` and `glide` are
environments of two parts of the task.
"""
