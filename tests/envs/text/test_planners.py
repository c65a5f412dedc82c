"""The task of writing planners: its renamings are apart, and its reward is what the validator finds."""

from __future__ import annotations

import re

import pytest

from foresight.envs.make import make
from foresight.envs.pddl import renaming
from foresight.envs.text import planners
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

TASK = make("planners", "text", planning="gripper,forest", size=4, held_out=2, problems=2, tests=2)


def test_demonstrations_are_right_and_others_are_not():
    right = [planners.demonstration(one) for one in (*TASK.train[:2], *TASK.test)]
    examples = [*TASK.train[:2], *TASK.test]
    assert TASK.grade(examples, [f"```python\n{code}```" for code in right]) == [1, 1, 1, 1]
    assert TASK.grade(TASK.train[:2], [right[2], "get_plan"]) == [0, 0]
    assert TASK.grade(TASK.test[:1], ["no program"]) == [0]


@sabotaged_by("foresight.envs.pddl.renaming.with_constants", lambda original: lambda source, names: source)
@sabotaged_by("foresight.envs.pddl.renaming.with_constants", lambda original: renaming.rename_program)
def test_a_demonstration_copies_the_names_of_its_prompt_once_and_in_their_order():
    for one in TASK.train:
        assert one.prompt.endswith(planners.ASK)
        steps = next(line for line in one.prompt.splitlines() if line.startswith("Steps: "))
        actions = [line.split()[1] for line in one.prompt.splitlines() if "(:action" in line]
        assert all(f"({action} x0" in steps for action in actions)
        copied = re.findall(r'^[A-Z_]+ = "(\w+)"$', planners.demonstration(one), re.MULTILINE)
        predicates = re.findall(r"^    \((\w+)", one.prompt, re.MULTILINE)
        assert copied[: len(predicates)] == predicates and copied[-len(actions) :] == actions


def test_held_out_names_are_others_and_may_have_no_meaning():
    prompts = [one.prompt for one in (*TASK.train, *TASK.test)]
    assert len(set(prompts)) == len(prompts)
    bare = make("planners", "text", planning="ferry", size=1, held_out=1, problems=1, tests=1, nameless=True)
    assert "predicate0" in bare.test[0].prompt and "predicate0" not in bare.train[0].prompt
    with pytest.raises(UserError, match="Unknown domain 'griper'"):
        make("planners", "text", planning="griper")
    with pytest.raises(UserError, match="must be at least 1, not 0"):
        make("planners", "text", size=0)
