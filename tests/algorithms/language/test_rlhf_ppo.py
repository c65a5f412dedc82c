"""PPO for RLHF: what a token earns, whom its advantage is measured against, and where both models start."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.language import reward_model, rlhf_ppo
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.generation.rollout import complete, sample_groups
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.tiny_states import fresh
from tests.sabotage import begins_anew, change, flip_sign, sabotaged_by, scaled, swap
from tests.tiny_conversations import where_they_are

PROMPTS = ["1+1?", "22+3?", "4?", "4?", "5?", "678?"]
REWARDS = torch.tensor([[1.0], [0.0], [0.5], [-1.0], [2.0], [0.0]])


def _rollout(**fields):
    base = {"model": tiny_language.folder(), "precision": "float32", "prompts": 6, "minibatches": 2}
    state = fresh(rlhf_ppo, **{**base, "max_new_tokens": 6, "max_grad_norm": math.inf, **fields})
    state.policy.stop_ids = [0, 5, 9, 14, 20]
    batch = complete(state.policy, PROMPTS, 1, 6, state.config.temperature, state.generator)
    assert 0 < batch.stopped.float().mean() < 1
    return state, batch


def _disturb(module: torch.nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=generator))


@sabotaged_by("foresight.ops.kl.k1", flip_sign, scaled(2.0))
@sabotaged_by("foresight.ops.returns.gae", swap("value", "next_value"), change("lam", lambda x: 1.0))
@sabotaged_by("foresight.ops.returns.gae", change("discount", torch.ones_like))
def test_the_targets_are_those_of_the_definition_token_by_token():
    _compare_targets(torch.ones(6, dtype=torch.bool))


@sabotaged_by("foresight.data.text.TokenBatch.steps", where_they_are)
@pytest.mark.parametrize("written", [(1, 2, 4), (3, 5)])
def test_in_a_conversation_the_own_tokens_of_all_turns_are_the_steps(written):
    """What the environment wrote between two turns, at the places `written`, or after the last one, is no step."""
    _compare_targets(~torch.isin(torch.arange(6), torch.tensor(written)))


def _compare_targets(own: torch.Tensor) -> None:
    state, batch = _rollout(kl_coef=0.3, gamma=0.9, gae_lambda=0.8, whiten=False, missing_eos_penalty=0.7)
    batch = dataclasses.replace(batch, own=own[: batch.completion.shape[-1]].expand(batch.completion.shape))
    _disturb(state.reference)
    _disturb(state.critic)
    state.critic.reset(0.5, torch.Generator().manual_seed(2))
    targets, metrics = rlhf_ppo.prepare(state, batch, REWARDS)
    with torch.no_grad():
        actor, reference = (model.logprob(batch)[0][:, 0] for model in (state.policy, state.reference))
        value = state.critic.values(batch)[:, 0]
    total = 0.0
    for b in range(len(PROMPTS)):
        places = batch.mask[b, 0].nonzero().flatten().tolist()
        advantage, following = 0.0, None
        for t in reversed(places):
            reward = -0.3 * (actor[b, t] - reference[b, t])
            total += float(actor[b, t] - reference[b, t])
            if following is None:
                reward = reward + REWARDS[b, 0] - 0.7 * float(not batch.stopped[b, 0])
                advantage = reward - value[b, t]
            else:
                advantage = reward + 0.9 * value[b, following] - value[b, t] + 0.9 * 0.8 * advantage
            following = t
            torch.testing.assert_close(targets.advantage[b, 0, t], advantage, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(targets.target[b, 0, t], advantage + value[b, t], atol=1e-5, rtol=1e-5)
        assert (targets.advantage[b, 0][~batch.mask[b, 0]] == 0).all()
    assert math.isclose(metrics["kl"], total / int(batch.mask.sum()), rel_tol=1e-4)


@sabotaged_by("foresight.nets.language.scorer.Scorer.values", lambda f: lambda self, batch: f(self, batch).roll(-1, -1))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_value_is_of_the_state_before_its_token(precision):
    """The baseline of a token.

    Wrong: a value computed after the token is a baseline that depends on the action, and biases the gradient.
    Invariant: V_t is a function of (q, o_<t): it does not change with o_t.
    """
    state, batch = _rollout(precision=precision)
    state.critic.reset(0.5, torch.Generator().manual_seed(2))
    values = state.critic.values(batch)[:, 0].detach()
    changed = dataclasses.replace(batch, completion=batch.completion.clone())
    changed.completion[:, 0, 2] = (changed.completion[:, 0, 2] + 1) % 30
    again = state.critic.values(changed)[:, 0].detach()
    long = batch.length[:, 0] > 3
    assert long.any()
    assert torch.equal(values[long][:, :3], again[long][:, :3])
    assert (values[long][:, 3] != again[long][:, 3]).all()


@sabotaged_by("foresight.planning.generation.decoding.generate", change("temperature", lambda t: 1.5 * t))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_before_the_first_update_ratio_is_1_and_kl_and_values_are_0(precision):
    state, batch = _rollout(precision=precision, minibatches=1, temperature=0.7)
    targets, _ = rlhf_ppo.prepare(state, batch, REWARDS)
    assert (targets.value == 0).all()
    metrics = rlhf_ppo.update(state, batch, REWARDS)
    assert metrics["kl"] == 0
    tolerance = 1e-5 if precision == "float32" else 0.05
    assert metrics["clip_fraction"] == 0 and metrics["approx_kl"] < tolerance
    assert metrics["sampler_error"] < tolerance


def _gradients(state, batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    caught: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for into, optimizer in zip(caught, (state.optimizer, state.critic_optimizer), strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(
            lambda *_, into=into, parameters=parameters: into.extend(p.grad.clone() for p in parameters)
        )
    rlhf_ppo.update(state, batch, REWARDS)
    return caught


@sabotaged_by("foresight.ops.value.clipped_loss", scaled(2.0))
@sabotaged_by("foresight.ops.policy.clipped_surrogate", flip_sign)
def test_the_first_gradients_are_those_of_policy_gradient_and_regression():
    state, batch = _rollout(minibatches=1, entropy_coef=0.2)
    before = copy.deepcopy(state)
    actor, critic = _gradients(state, batch)
    targets, _ = rlhf_ppo.prepare(before, batch, REWARDS)
    n = int(batch.mask.sum())
    logits = before.policy.logits(before.policy.contexts(batch))
    plain = torch.distributions.Categorical(logits=logits)
    advantage = targets.advantage[batch.mask]
    objective = (plain.log_prob(batch.completion[batch.mask]) * advantage + 0.2 * plain.entropy()).sum() / n
    (-objective).backward()
    for mine, parameter in zip(actor, before.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-5, rtol=1e-4)
    error = before.critic.values(batch)[batch.mask] - targets.target[batch.mask]
    (0.5 * error.square().sum() / n).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in before.critic.parameters()]
    for mine, grad in zip(critic, expected, strict=True):
        torch.testing.assert_close(mine, grad, atol=1e-6, rtol=1e-4)


@sabotaged_by("torch.randperm", lambda f: lambda n, **_: torch.arange(n))
def test_minibatches_cover_every_answer_once_an_epoch():
    state, batch = _rollout(minibatches=3, epochs=2)
    seen: list[int] = []
    original = state.policy.logprob

    def watched(few, *rest):
        if torch.is_grad_enabled():
            seen.extend(tuple(p) for p in few.prompts())
        return original(few, *rest)

    state.policy.logprob = watched  # type: ignore[method-assign]
    rlhf_ppo.update(state, batch, REWARDS)
    wanted = [tuple(p) for p in batch.prompts()]
    assert sorted(seen[:6]) == sorted(seen[6:]) == sorted(wanted)
    assert seen[:6] != seen[6:]  # shuffled again


@sabotaged_by("foresight.data.text.TokenBatch.scored", change("rewards", torch.nan_to_num, "none_is_zero"))
def test_an_unscorable_answer_trains_neither_model():
    state, batch = _rollout()
    rewards = REWARDS.clone()
    rewards[1, 0] = math.nan
    targets, metrics = rlhf_ppo.prepare(state, batch, rewards)
    assert not targets.mask[1].any() and (targets.advantage[1] == 0).all()
    assert metrics["unscorable"] == pytest.approx(1 / 6)
    assert all(math.isfinite(v) for v in rlhf_ppo.update(state, batch, rewards).values())


@sabotaged_by("foresight.training.microbatch.finite", lambda f: lambda metrics: True)
@pytest.mark.parametrize("field", ["advantage", "target"])
def test_after_a_loss_that_is_not_finite_there_is_no_other_step(field, monkeypatch):
    state, batch = _rollout(minibatches=6)
    first = torch.randperm(6, generator=torch.Generator().set_state(state.generator.get_state()))[0]
    targets, metrics = rlhf_ppo.prepare(state, batch, REWARDS)
    getattr(targets, field)[first] = math.nan
    monkeypatch.setattr(rlhf_ppo, "prepare", lambda *_: (targets, metrics))
    optimizers = [state.critic_optimizer, *([state.optimizer] if field == "advantage" else [])]  # the actor is first
    weights = [x for one in optimizers for group in one.param_groups for x in group["params"]]
    before = [x.detach().clone() for x in weights]
    found = rlhf_ppo.update(state, batch, REWARDS)
    assert math.isnan(found["loss" if field == "advantage" else "value_loss"])
    assert all(torch.equal(x, y) for x, y in zip(weights, before, strict=True))


@sabotaged_by("foresight.training.microbatch.gather", lambda f: lambda *args: f(*args).flip(-1))
def test_a_reward_model_scores_the_sampled_ids(tmp_path):
    """The reward model gets the sampled ids, not a text that is tokenized again.

    Wrong: it scores another answer, without an end token or with two (TRL 5224).
    Invariant: score = s(q, o) of the sampled ids, equal to the output of the reward model alone.
    """
    scorer = reward_model.build(build_config(reward_model.Config, tiny_language.folder(), seed=3, precision="float32"))
    reward_model.export(scorer, tmp_path / "scorer")
    state, _ = _rollout(reward_model=str(tmp_path / "scorer"))
    task = TextTask("t", [Example(p) for p in PROMPTS[:3]], [Example("9?")], lambda e, c: [0.5] * len(c))
    rollout = sample_groups(state.policy, task, 3, 2, 6, 1.0, state.generator)
    scores = rlhf_ppo.score(state, rollout)
    with torch.no_grad():
        torch.testing.assert_close(scores, scorer.scorer.scores(rollout.batch), atol=1e-5, rtol=1e-5)
    config = dataclasses.replace(state.config, prompts=3, group=2, minibatches=1, steps=1)
    _, metrics, _ = next(rlhf_ppo.train(config, task, dataclasses.replace(state, config=config)))
    assert metrics["grade"] == 0.5 and metrics["reward"] != 0.5


@sabotaged_by("foresight.data.text.TokenBatch.last", lambda f: lambda batch: batch.length - 1)
def test_a_conversation_that_a_message_ends_is_scored_where_the_model_ended(tmp_path):
    """A budget may end it there. Wrong: a score of exactly 0, since the scorer reads own tokens only."""
    scorer = reward_model.build(build_config(reward_model.Config, tiny_language.folder(), seed=3, precision="float32"))
    reward_model.export(scorer, tmp_path / "scorer")
    state, batch = _rollout(reward_model=str(tmp_path / "scorer"))
    width = batch.completion.shape[-1]
    own = (torch.arange(width) < width - 1).expand(batch.completion.shape)
    whole = dataclasses.replace(batch, own=own)
    cut = dataclasses.replace(batch, length=batch.length.clamp(max=width - 1))
    scores = rlhf_ppo.score(state, SimpleNamespace(batch=whole))
    assert (scores != 0).all() and (batch.length == width).any()
    with torch.no_grad():
        torch.testing.assert_close(scores, scorer.scorer.scores(cut), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores, scorer.scorer.scores(whole), atol=1e-5, rtol=1e-5)


def test_a_reward_model_of_steps_is_refused(tmp_path):
    state = reward_model.build(build_config(reward_model.Config, tiny_language.folder(), precision="float32"))
    state.scorer.of_steps = True
    reward_model.export(state, tmp_path / "steps")
    with pytest.raises(UserError, match="was trained on steps, and rlhf_ppo scores whole answers"):
        _rollout(reward_model=str(tmp_path / "steps"))


@sabotaged_by("foresight.algorithms.language.rlhf_ppo.train", begins_anew)
def test_a_mid_run_state_continues_bit_for_bit():
    task = TextTask("t", [Example(p) for p in PROMPTS], [Example("9?")], lambda e, c: [float(x.count("a")) for x in c])
    config = build_config(
        rlhf_ppo.Config,
        tiny_language.folder(),
        steps=4,
        prompts=4,
        minibatches=2,
        max_new_tokens=6,
        precision="float32",
    )
    for step, _, whole in rlhf_ppo.train(config, task):
        if step == 2:
            halfway = copy.deepcopy(whole)
    *_, (_, _, resumed) = rlhf_ppo.train(config, task, halfway)
    for name in ("policy", "critic"):
        a, b = (getattr(state, name).state_dict() for state in (whole, resumed))
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ["critic", "reward model"])
def test_a_scorer_with_a_shorter_context_is_named_before_it_reads(name):
    """Wrong: scores of a text of which the model could not read the beginning, or a traceback."""
    state, batch = _rollout(steps=1)
    state.reward_model = copy.deepcopy(state.critic)
    scorer = state.critic if name == "critic" else state.reward_model
    scorer.trunk.context = 9
    task = TextTask("t", [Example(p) for p in PROMPTS], [], lambda e, c: [0.0] * len(c))
    with pytest.raises(UserError, match=rf"training prompt 1 of 't' .*into the {name}'s context of 9"):
        next(rlhf_ppo.train(state.config, task, state))
    with pytest.raises(UserError, match=r"has 1\d tokens, and the critic or reward model .* context of 9"):
        scorer.scores(batch)


def test_more_minibatches_than_prompts_are_refused():
    with pytest.raises(UserError, match="minibatches is 7"):
        _rollout(minibatches=7)


@sabotaged_by("foresight.algorithms.language.rlhf_ppo.shaped", lambda f: lambda rewards, *rest: f(rewards, False, None))
def test_rewards_are_normalized_and_clipped_before_the_penalties():
    found = []
    for fields, rewards in (
        ({"normalize_reward": True, "clip_reward": 1.0}, REWARDS),
        ({}, rlhf_ppo.shaped(REWARDS, True, 1.0)),
        ({}, REWARDS),
    ):
        state, batch = _rollout(kl_coef=0.3, missing_eos_penalty=0.7, **fields)
        found.append(rlhf_ppo.prepare(state, batch, rewards)[0].target)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@sabotaged_by("foresight.algorithms.language.rlhf_ppo.shaped", lambda f: lambda rewards, *rest: rewards.nan_to_num())
def test_scores_are_normalized_over_the_scored_ones_and_then_clipped():
    rewards = torch.tensor([[1.0], [3.0], [math.nan], [11.0]])
    found = rlhf_ppo.shaped(rewards, True, 1.0)
    expected = (torch.tensor([1.0, 3.0, 11.0]) - 5) / torch.tensor([1.0, 3.0, 11.0]).std()
    torch.testing.assert_close(found[[0, 1, 3], 0], expected.clamp(-1, 1))
    assert found[2] == 0 and torch.equal(rlhf_ppo.shaped(rewards, False, None), rewards.nan_to_num())


def test_the_critic_has_a_lambda_of_its_own():
    """With 1 its targets are the returns, whatever the advantages' λ; without it they are those of one GAE."""
    state, batch = _rollout(kl_coef=0.0, gae_lambda=0.3, critic_lambda=1.0, whiten=False)
    state.critic.reset(0.5, torch.Generator().manual_seed(2))
    own, _ = rlhf_ppo.prepare(state, batch, REWARDS)
    torch.testing.assert_close(own.target, REWARDS[..., None] * own.mask, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(own.advantage + own.value, own.target)
    shared = []
    for given in (0.3, None):  # the actor's λ is the default
        state, batch = _rollout(kl_coef=0.1, gae_lambda=0.3, critic_lambda=given, whiten=False)
        state.critic.reset(0.5, torch.Generator().manual_seed(2))
        shared.append(rlhf_ppo.prepare(state, batch, REWARDS)[0].target)
    assert torch.equal(*shared)


def test_the_critic_may_be_trained_first():
    """The actor's own warmup of the rate begins afterwards."""
    state, batch = _rollout(critic_warmup=1, learning_rate=1e-2, lr_warmup=100)
    before, head = copy.deepcopy(state.policy.state_dict()), copy.deepcopy(state.critic.state_dict())
    rlhf_ppo.update(state, batch, REWARDS)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), state.policy.state_dict().values(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(head.values(), state.critic.state_dict().values(), strict=True))
    state.step = 1
    rlhf_ppo.update(state, batch, REWARDS)
    after = state.policy.state_dict()
    moved = max((a - b).abs().max().item() for a, b in zip(before.values(), after.values(), strict=True))
    assert 0 < moved < 1.1e-4 * state.config.minibatches  # a step of AdamW is at most about the rate, 1e-2 / 100
