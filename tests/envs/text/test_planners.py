"""The task of writing planners: its renamings are apart, and its reward is what the validator finds."""

from __future__ import annotations

import pytest

from foresight.envs.make import make
from foresight.envs.text import planners
from foresight.errors import UserError
from tests.sabotage import sabotaged_by

TASK = make("planners", "text", planning="gripper,forest", size=4, held_out=2, problems=2, tests=2)


def others_names(original):
    return lambda name, seed, nameless: original(name, seed + 1, nameless)


def test_demonstrations_are_right_and_others_are_not():
    right = [planners.demonstration(one) for one in (*TASK.train[:2], *TASK.test)]
    examples = [*TASK.train[:2], *TASK.test]
    assert TASK.grade(examples, [f"```python\n{code}```" for code in right]) == [1, 1, 1, 1]
    assert TASK.grade(TASK.train[:2], [right[2], "get_plan"]) == [0, 0]
    assert TASK.grade(TASK.test[:1], ["no program"]) == [0]


@sabotaged_by("foresight.envs.pddl.renaming.rename_program", lambda original: lambda source, names: source)
def test_a_demonstration_is_in_the_names_of_its_prompt():
    for one in TASK.train:
        assert "(:action" in one.prompt and one.prompt.endswith(planners.ASK)
        actions = [line.split()[1] for line in one.prompt.splitlines() if "(:action" in line]
        assert all(f"({action} " in planners.demonstration(one) for action in actions)


def test_held_out_names_are_others_and_may_have_no_meaning():
    prompts = [one.prompt for one in (*TASK.train, *TASK.test)]
    assert len(set(prompts)) == len(prompts)
    bare = make("planners", "text", planning="ferry", size=1, held_out=1, problems=1, tests=1, nameless=True)
    assert "predicate0" in bare.test[0].prompt and "predicate0" not in bare.train[0].prompt
    with pytest.raises(UserError, match="Unknown domain 'griper'"):
        make("planners", "text", planning="griper")
    with pytest.raises(UserError, match="must be at least 1, not 0"):
        make("planners", "text", size=0)
