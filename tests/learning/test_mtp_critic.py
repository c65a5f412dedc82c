"""The multi-token critic finds a known optimum, and its values find those that can be computed in closed form."""

from __future__ import annotations

import pytest
import torch

from foresight.algorithms.language import mtp_critic
from foresight.data.text import TokenBatch, pad
from foresight.envs.text.task import Example, TextTask
from foresight.nets.language import mtp
from foresight.ops.diagnostics import explained_variance
from foresight.training.options import build_config
from tests import tiny_language
from tests.sabotage import change, flip_sign, sabotaged_by, shift

pytestmark = pytest.mark.learning


def _share_of_digits(length: int):
    return lambda examples, completions: [sum(c.isdigit() for c in text) / length for text in completions]


def _task(length: int) -> TextTask:
    prompts = [Example(f"{a}+{b}?") for a in range(8) for b in range(8)]
    return TextTask("digits", prompts, [Example(f"{i}?") for i in "abcd"], _share_of_digits(length))


def _greedy(state, task: TextTask) -> float:
    completions, _, _ = mtp_critic.act(state, task.test)
    return sum(task.grade(task.test, completions)) / len(completions)


@sabotaged_by("foresight.ops.returns.gae", flip_sign)
def test_it_learns_to_write_digits():
    task = _task(6)
    config = build_config(
        mtp_critic.Config, tiny_language.folder(), steps=20, max_new_tokens=6, learning_rate=1e-2, precision="float32"
    )
    untrained = _greedy(mtp_critic.build(config), task)
    *_, (_, _, state) = mtp_critic.train(config, task)
    assert untrained < 0.5
    assert _greedy(state, task) >= 0.95


@torch.no_grad()
def _exact(policy, prompts: list[list[int]]) -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
    """All answers of two tokens as a batch `[P, V, 2]`, what each state is worth, and how likely it is."""
    size = len(tiny_language.CHARACTERS)
    digit = torch.tensor([c.isdigit() for c in tiny_language.CHARACTERS]).float()
    prompt, prompt_length = pad(prompts)
    first = torch.arange(size).expand(len(prompts), size)
    completion = torch.stack([first, torch.zeros_like(first)], -1)
    length = torch.full(first.shape, 2)
    batch = TokenBatch(prompt, prompt_length, completion, length, torch.zeros(completion.shape), length > 5)
    seen = mtp.view(policy, batch)
    mass = policy.logits(seen.hidden[seen.context]).softmax(-1)  # [n, V], of the token that follows each state
    worth = torch.zeros(completion.shape)
    goes_on = first != 0  # token 0 ends the answer
    worth[..., 1] = 0.5 * (digit[first] + goes_on * seen.scatter(mass @ digit)[..., 1])
    chance = seen.scatter(mass.T)[:, :, 0, 0].T  # [P, V]
    worth[..., 0] = (chance * worth[..., 1]).sum(1, keepdim=True)
    likely = torch.stack([torch.full(first.shape, 1 / size), chance * goes_on], -1) / len(prompts)
    return batch, worth, likely


@sabotaged_by("foresight.ops.returns.lambda_return", change("discount", lambda d: 0.0 * d), shift("reward"))
def test_its_values_become_the_exact_ones():
    """A language of two tokens, a policy that stands still: the value of every state is a sum over all answers."""
    task = _task(2)
    config = build_config(
        mtp_critic.Config,
        tiny_language.folder(),
        steps=80,
        max_new_tokens=2,
        learning_rate=0.0,
        head_learning_rate=1e-2,
        token_coef=0.0,
        value_coef=1.0,
        detach_value=True,
        precision="float32",
    )
    state = mtp_critic.build(config)
    batch, worth, likely = _exact(state.policy, [state.policy.encode(e.prompt) for e in task.train[::7]])
    rows = torch.multinomial(likely.flatten(), 4000, replacement=True, generator=torch.Generator().manual_seed(0))

    def explained() -> float:
        with torch.no_grad():
            seen = mtp.view(state.policy, batch)
            features, _ = state.heads(seen.hidden, seen.embedded, seen.parents)
            values = seen.scatter(state.heads.values(features[:, seen.context]))
        return explained_variance(values.mean(0).flatten()[rows], worth.flatten()[rows]).item()

    untrained = explained()
    run = mtp_critic.train(config, task, state)
    for step, _, state in run:  # noqa: B007
        assert step != 30 or explained() > 0.33
    trained = explained()
    assert untrained <= 0.01
    assert trained >= 0.7
