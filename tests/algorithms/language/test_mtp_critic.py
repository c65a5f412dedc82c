"""The multi-token critic: its targets and its gradient by the definition, and what may not reach what."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from foresight.algorithms.language import mtp_critic
from foresight.envs.text.task import Example, TextTask
from foresight.errors import UserError
from foresight.planning.generation.rollout import complete
from foresight.training.options import build_config
from tests import tiny_language
from tests.algorithms.language.tiny_states import fresh
from tests.sabotage import begins_anew, change, drop, flip_sign, sabotaged_by, scaled, shift, swap
from tests.tiny_conversations import where_they_are

PROMPTS = ["1+1?", "22+3?", "4?", "4?", "5?", "678?"]
REWARDS = torch.tensor([[1.0], [0.0], [0.5], [-1.0], [2.0], [0.0]])


def _rollout(**fields):
    """A state whose heads and averages are far from each other and from 0, and six answers."""
    base = {"model": tiny_language.folder(), "precision": "float32", "max_new_tokens": 6, "max_grad_norm": math.inf}
    state = fresh(mtp_critic, **{**base, **fields})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for heads in (state.heads, state.averaged):
            for weight in heads.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    state.policy.stop_ids = [0, 5, 9, 14, 20]
    batch = complete(state.policy, PROMPTS, 1, 6, state.config.temperature, state.generator)
    assert 0 < batch.stopped.float().mean() < 1
    return state, batch


@sabotaged_by("foresight.training.microbatch.step", change("count", lambda n: 2 * n))
def test_metrics_per_token_are_over_the_models_own_tokens():
    state, batch = _rollout()
    batch = dataclasses.replace(batch, own=(torch.arange(batch.completion.shape[-1]) % 2 == 0).expand_as(batch.mask))
    with torch.no_grad():
        expected = state.policy.logprob(batch)[1].sum() / batch.mask.sum()
    assert mtp_critic.update(state, batch, REWARDS)["entropy"] == pytest.approx(expected.item(), rel=1e-4)


def _gradients(state, batch, rewards=REWARDS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What an update hands to the optimizers of trunk and heads."""
    caught: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for into, optimizer in zip(caught, (state.optimizer, state.head_optimizer), strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(
            lambda *_, into=into, parameters=parameters: into.extend(
                torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters
            )
        )
    mtp_critic.update(state, batch, rewards)
    return caught


def _row(state, batch, b: int, heads, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Features `[K, T, D]` before each token of answer b, from the trunk's `[n, D]`; 1 where a head does not exist."""
    start, length = int(batch.prompt_length[b]), int(batch.length[b, 0])
    chain = [hidden]
    for k in range(2, len(heads) + 1):
        longer = torch.ones_like(hidden)
        longer[1:] = heads.extend(k, chain[-1][:-1], embedded[1:])
        chain.append(longer)
    return torch.stack(chain)[:, start - 1 : start - 1 + length]


def _values(heads, features: torch.Tensor) -> torch.Tensor:
    unit = features / features.square().mean(-1, keepdim=True).sqrt()
    read = unit @ heads.read.weight.T + heads.read.bias
    return 100 * (read * read.sigmoid() * heads.value_weight[:, None]).mean(-1)


@functools.cache
def _plain() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_language.folder(), dtype=torch.float32)


def _literal(state, batch, rewards=REWARDS, module=None):
    """The loss of the docstring, one answer after another over transformers' own forward pass."""
    config, total = state.config, int(batch.length.sum())
    module = module or copy.deepcopy(_plain())
    loss, found = torch.zeros(()), []
    for b in range(len(PROMPTS)):
        start, n = int(batch.prompt_length[b]), int(batch.length[b, 0])
        row = torch.cat([batch.prompt[b, :start], batch.completion[b, 0, :n]])
        hidden = module.model(row[None]).last_hidden_state[0]
        embedded = module.model.embed_tokens(row).detach()
        logits = (hidden @ module.lm_head.weight.T)[start - 1 : -1] / config.temperature
        logp = logits.log_softmax(-1)[torch.arange(n), row[start:]]
        seen = hidden.detach() if config.detach_value else hidden
        values = _values(state.heads, _row(state, batch, b, state.heads, seen, embedded))
        with torch.no_grad():
            averaged = _values(state.averaged, _row(state, batch, b, state.averaged, hidden, embedded))
        exist = start - 1 + torch.arange(n) >= torch.arange(len(values))[:, None]
        value = torch.stack([values[exist[:, t], t].mean() for t in range(n)]).detach()
        advantage, target = torch.zeros(n), torch.zeros(len(values), n)
        following = None
        for t in reversed(batch.mask[b, 0].nonzero().flatten().tolist()):
            if following is None:
                advantage[t], target[:, t] = rewards[b, 0] - value[t], rewards[b, 0]
            else:
                error = config.gamma * value[following] - value[t]
                advantage[t] = error + config.gamma * config.gae_lambda * advantage[following]
                ahead = (1 - config.td_lambda) * averaged[:, following] + config.td_lambda * target[:, following]
                target[:, t] = config.gamma * ahead
            following = t
        found.append((advantage, target, value))
        closed = _row(state, batch, b, state.heads, hidden.detach(), embedded)
        plain = (logits * config.temperature).detach().softmax(-1)
        for t in range(n):
            loss = loss - (logp[t] - logp[t].detach()).exp() * advantage[t]
            predictions = [k for k in range(len(values)) if exist[k, t]]
            for k in predictions:
                error = values[k, t] - target[k, t]
                c = config.clip_value
                huber = 0.5 * error**2 if error.abs() <= c else c * (error.abs() - 0.5 * c)
                loss = loss + config.value_coef * huber / len(predictions)
                if k:
                    draft = (closed[k, t] @ module.lm_head.weight.detach().T).log_softmax(-1)
                    distance = (plain[t] * (plain[t].log() - draft)).sum()
                    loss = loss + config.token_coef * distance / (len(predictions) - 1)
    return loss / total, found, module


CHANGED = {"gamma": 0.9, "gae_lambda": 0.8, "temperature": 0.7, "value_coef": 0.3, "clip_value": 0.4, "token_coef": 0.2}


def _compare(**fields) -> None:
    state, batch = _rollout(**CHANGED, **fields)
    before = copy.deepcopy(state)
    trunk, heads = _gradients(state, batch)
    loss, _, module = _literal(before, batch)
    loss.backward()
    for (name, parameter), mine in zip(module.named_parameters(), trunk, strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=2e-5, rtol=1e-3, msg=name)
    for (name, parameter), mine in zip(before.heads.named_parameters(), heads, strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=2e-5, rtol=1e-3, msg=name)


@sabotaged_by("foresight.ops.value.huber_loss", scaled(2.0), swap("value", "target"))
@sabotaged_by("foresight.ops.returns.gae", swap("value", "next_value"), flip_sign)
@sabotaged_by("foresight.ops.returns.lambda_return", change("discount", torch.ones_like), shift("next_value"))
@sabotaged_by("foresight.ops.tokens.token_divergence", swap("logits", "target"))
@pytest.mark.parametrize("extra", [{}, {"detach_value": True, "td_lambda": 0.5}], ids=["open", "detached"])
def test_the_gradient_is_that_of_the_definition(extra):
    _compare(**extra)


@sabotaged_by("foresight.ops.value.huber_loss", scaled(2.0))
def test_with_one_head_it_is_a_value_on_the_trunk():
    _compare(predict_tokens=1)


@sabotaged_by("foresight.ops.returns.gae", change("lam", lambda x: 1.0))
@sabotaged_by("foresight.ops.returns.lambda_return", change("lam", lambda x: 0.0))
def test_the_targets_are_those_of_the_definition():
    state, batch = _rollout(**CHANGED, td_lambda=0.5)
    weights = torch.zeros(batch.completion.shape)
    _, fixed, _ = mtp_critic.loss(state, batch, REWARDS, weights, None)
    for b, (advantage, target, value) in enumerate(_literal(state, batch)[1]):
        n = int(batch.length[b, 0])
        torch.testing.assert_close(fixed.advantage[b, 0, :n], advantage, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(fixed.target[0, b, 0, :n], target[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(fixed.value[b, 0, :n], value, atol=1e-4, rtol=1e-4)
        assert (fixed.advantage[b, 0, n:] == 0).all() and (fixed.target[:, b, 0, n:] == 0).all()
        earned = [REWARDS[b, 0] * 0.9 ** (n - 1 - t) for t in range(n)]
        torch.testing.assert_close(fixed.returns[b, 0, :n], torch.stack(earned), atol=1e-5, rtol=1e-5)


@sabotaged_by("foresight.data.text.TokenBatch.steps", where_they_are)
@pytest.mark.parametrize("written", [(1, 2, 4), (3, 5)])
def test_in_a_conversation_the_own_tokens_of_all_turns_are_the_steps(written):
    state, batch = _rollout(**CHANGED, td_lambda=0.5)
    own = ~torch.isin(torch.arange(batch.completion.shape[-1]), torch.tensor(written))
    batch = dataclasses.replace(batch, own=own.expand(batch.completion.shape))
    _, fixed, _ = mtp_critic.loss(state, batch, REWARDS, torch.zeros(batch.completion.shape), None)
    for b, (advantage, target, _) in enumerate(_literal(state, batch)[1]):
        n = int(batch.length[b, 0])
        torch.testing.assert_close(fixed.advantage[b, 0, :n], advantage, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(fixed.target[0, b, 0, :n], target[0], atol=1e-4, rtol=1e-4)


@sabotaged_by("foresight.planning.generation.decoding.generate", change("temperature", lambda t: 1.5 * t))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_first_pass_is_its_own_old_policy(precision):
    state, batch = _rollout(precision=precision, temperature=0.7, epochs=1)
    metrics = mtp_critic.update(state, batch, REWARDS)
    assert metrics["clip_fraction"] == 0
    assert metrics["sampler_error"] < (1e-5 if precision == "float32" else 0.05)
    assert all(math.isfinite(x) for x in metrics.values())


@sabotaged_by("foresight.algorithms.language.mtp_critic.loss", drop("fixed"))
def test_later_passes_are_held_against_the_first():
    state, batch = _rollout(epochs=3, learning_rate=1e-2)
    seen: list[float] = []
    original = mtp_critic.ratio

    def watched(logprob, old):
        seen.append(float((logprob.detach() - old).abs().max()))
        return original(logprob, old)

    mtp_critic.ratio = watched
    try:
        mtp_critic.update(state, batch, REWARDS)
    finally:
        mtp_critic.ratio = original
    assert len(seen) == 3 and seen[0] == 0 and 0 < seen[1] < seen[2]


@sabotaged_by("foresight.training.microbatch.record_old_policy", lambda f: lambda *_: None)
def test_each_minibatch_uses_the_rollout_as_it_was_before_the_first():
    """Old policy, advantages and targets of the second step are those before the first, and so is its baseline."""
    state, batch = _rollout(minibatches=2, learning_rate=1e-2)
    first, steps = copy.deepcopy(state), []

    def seen(*_):
        moved = dataclasses.replace(first, policy=copy.deepcopy(state.policy), heads=copy.deepcopy(state.heads))
        steps.append((moved, [p.grad.clone() for p in state.policy.parameters()]))

    state.optimizer.register_step_pre_hook(seen)
    mtp_critic.update(state, batch, REWARDS)
    order = torch.randperm(len(PROMPTS), generator=first.generator).tensor_split(2)
    for groups, (moved, caught) in zip(order, steps, strict=True):
        few = batch.select(groups)
        weights = few.mask / few.mask.sum()
        fixed = mtp_critic.loss(first, few, REWARDS[groups], weights, None)[1]
        mtp_critic.loss(moved, few, REWARDS[groups], weights, fixed)[0].backward()
        for mine, parameter in zip(caught, moved.policy.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, atol=2e-5, rtol=1e-3)


@sabotaged_by("foresight.training.microbatch.split", lambda f: lambda *a: f(*a)[:1])
def test_the_gradients_do_not_depend_on_the_micro_batches():
    whole = _gradients(*_rollout(micro_tokens=10_000))
    split = _gradients(*_rollout(micro_tokens=1))
    for one, other in zip(whole, split, strict=True):
        assert len(one) == len(other) > 0
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("field", "detached", "equal"), [
    ("token_coef", False, True),  # never reaches the trunk
    ("value_coef", True, True),
    ("value_coef", False, False),
])  # fmt: skip
def test_what_reaches_the_trunk(field, detached, equal):
    (one, heads_one), (other, heads_other) = (
        _gradients(*_rollout(**{field: coefficient}, detach_value=detached)) for coefficient in (0.0, 1.0)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) == equal
    assert not all(torch.equal(a, b) for a, b in zip(heads_one, heads_other, strict=True))


@sabotaged_by("foresight.ops.value.huber_loss", change("delta", lambda d: 1e9))
def test_the_gradient_of_a_value_is_clamped():
    """However far the target: beyond the clamp, its distance does not matter."""
    worths = []
    for factor in (1e3, 1e4):
        state, batch = _rollout(detach_value=True)
        worths.append(_gradients(state, batch, factor * (REWARDS + 3.0))[1][0])
    torch.testing.assert_close(*worths)
    assert worths[0].any()


@sabotaged_by("foresight.training.optim.track", change("rate", lambda r: 1.0), swap("target", "source"))
def test_the_averages_follow_only_the_heads():
    state, batch = _rollout(tau=0.25)
    before = copy.deepcopy(state.averaged)
    mtp_critic.update(state, batch, REWARDS)
    for old, new, goal in zip(before.parameters(), state.averaged.parameters(), state.heads.parameters(), strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * goal)
        assert not new.requires_grad
    held = sum(x.numel() for x in state.averaged.parameters())
    assert held == sum(x.numel() for x in state.heads.parameters()) < sum(x.numel() for x in state.policy.parameters())


@sabotaged_by("foresight.nets.language.mtp.view", lambda f: lambda model, batch: _peeking(f(model, batch)))
def test_a_value_is_of_the_state_before_its_token():
    """A value that had seen its token would be a baseline that depends on the action."""
    state, batch = _rollout()
    changed = dataclasses.replace(batch, completion=batch.completion.clone())
    changed.completion[:, 0, 2] = (changed.completion[:, 0, 2] + 1) % 30
    found = []
    for one in (batch, changed):
        seen = mtp_critic.mtp.view(state.policy, one)
        features, _ = state.heads(seen.hidden, seen.embedded, seen.parents)
        found.append(seen.scatter(state.heads.values(features[:, seen.context]))[:, :, 0].detach())
    long = batch.length[:, 0] > 3
    assert long.any()
    torch.testing.assert_close(found[0][:, long, :3], found[1][:, long, :3], atol=1e-5, rtol=1e-5)
    assert ((found[0] - found[1])[:, long, 3].abs() > 1e-3).all()


def _peeking(seen):
    """Every state as it is after its token."""
    children = torch.full_like(seen.context, 0)
    for i, context in enumerate(seen.context.tolist()):
        children[i] = int((seen.parents == context).nonzero()[0, 0])
    return dataclasses.replace(seen, context=children)


@sabotaged_by("foresight.data.text.TokenBatch.scored", change("rewards", torch.nan_to_num, "none_is_zero"))
def test_an_unscorable_answer_has_no_gradient():
    rewards = REWARDS.clone()
    rewards[1, 0] = math.nan
    state, batch = _rollout()
    gradients = _gradients(state, batch, rewards)
    other, _ = _rollout()
    kept = torch.tensor([0, 2, 3, 4, 5])
    expected = _gradients(other, batch.select(kept), rewards[kept])
    for one, two in zip(gradients, expected, strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    state, batch = _rollout()
    metrics = mtp_critic.update(state, batch, torch.full_like(REWARDS, math.nan))
    assert metrics == {"unscorable": 1.0, "left_out_groups": 1.0}


@sabotaged_by("foresight.data.text.TokenBatch.scored", change("whole", lambda whole: False, "all_answers"))
def test_an_answer_that_was_cut_off_can_be_left_out():
    state, batch = _rollout(mask_truncated=True)
    gradients = _gradients(state, batch)
    other, _ = _rollout()
    kept = batch.stopped[:, 0].nonzero()[:, 0]
    expected = _gradients(other, batch.select(kept), REWARDS[kept])
    for one, two in zip(gradients, expected, strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    batch.stopped.fill_(False)
    assert mtp_critic.update(state, batch, REWARDS) == {"unscorable": 0.0, "left_out_groups": 1.0}


def unpunished(original):
    return lambda state, batch, rewards: original(
        dataclasses.replace(state, config=dataclasses.replace(state.config, missing_eos_penalty=0.0)), batch, rewards
    )


@sabotaged_by("foresight.algorithms.language.mtp_critic.update", unpunished)
def test_an_answer_that_was_cut_off_can_be_punished():
    state, batch = _rollout(missing_eos_penalty=0.7)
    gradients = _gradients(state, batch)
    expected = _gradients(_rollout()[0], batch, REWARDS - 0.7 * ~batch.stopped)
    for one, two in zip(gradients, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@sabotaged_by("foresight.algorithms.language.mtp_critic.train", begins_anew)
@pytest.mark.parametrize("fields", [{}, {"minibatches": 2, "epochs": 2}], ids=["once", "minibatches"])
def test_a_mid_run_state_continues_bit_for_bit(fields):
    task = TextTask("t", [Example(p) for p in PROMPTS], [Example("9?")], lambda e, c: [float(x.count("a")) for x in c])
    config = build_config(
        mtp_critic.Config, tiny_language.folder(), steps=4, prompts=4, max_new_tokens=6, precision="float32", **fields
    )
    for step, _, whole in mtp_critic.train(config, task):
        if step == 2:
            halfway = copy.deepcopy(whole)
    *_, (_, _, resumed) = mtp_critic.train(config, task, halfway)
    for name in ("policy", "heads", "averaged"):
        a, b = (getattr(state, name).state_dict() for state in (whole, resumed))
        assert all(torch.equal(a[key], b[key]) for key in a)


@sabotaged_by("foresight.nets.language.pretrained.save_folder", drop("heads"))
def test_its_export_brings_the_heads_back(tmp_path):
    state, batch = _rollout()
    mtp_critic.update(state, batch, REWARDS)
    mtp_critic.export(state, tmp_path / "export")
    again = mtp_critic.build(dataclasses.replace(state.config, model=str(tmp_path / "export")))
    for a, b in zip(state.heads.parameters(), again.heads.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match="has 3 heads, not 2: give --predict-tokens 3"):
        mtp_critic.build(dataclasses.replace(state.config, model=str(tmp_path / "export"), predict_tokens=2))


@sabotaged_by("foresight.nets.language.pretrained.save_folder", drop("heads"))
@pytest.mark.parametrize("merged", [True, False])
def test_adapters_are_saved_with_the_heads(merged, tmp_path):
    state, batch = _rollout(lora=4, learning_rate=1e-2)
    mtp_critic.update(state, batch, REWARDS)
    mtp_critic.export(state, tmp_path / "export", merged)
    again = mtp_critic.build(dataclasses.replace(state.config, model=str(tmp_path / "export")))
    for a, b in zip(state.heads.parameters(), again.heads.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(again.policy.logprob(batch)[0], state.policy.logprob(batch)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_adapters_leave_the_trunk_as_it_is(precision):
    state, batch = _rollout(lora=4, learning_rate=1e-2, precision=precision)
    before = {name: weight.clone() for name, weight in state.policy.named_parameters()}
    metrics = mtp_critic.update(state, batch, REWARDS)
    assert all(math.isfinite(x) for x in metrics.values())
    for name, weight in state.policy.named_parameters():
        assert torch.equal(weight, before[name]) or "lora_" in name, name


def test_no_heads_are_refused():
    with pytest.raises(UserError, match="predict_tokens must be at least 1"):
        _rollout(predict_tokens=0)


@sabotaged_by("foresight.training.microbatch.split", change("tokens", lambda n: 1))
def test_the_trunk_is_run_once_a_part():
    state, batch = _rollout(micro_tokens=10_000)
    calls = []
    original = state.policy.states
    state.policy.states = lambda tree: calls.append(len(tree)) or original(tree)  # type: ignore[method-assign]
    mtp_critic.update(state, batch, REWARDS)
    assert len(calls) == 1
