"""Our losses and their gradients compared with TRL's, on the same inputs: see make_trl_losses.py.

Where the two differ, the test names the equation that decides.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foresight.algorithms.language import (
    cispo,
    dapo,
    distill,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    reward_model,
    rlhf_ppo,
    rloo,
    sft,
)
from foresight.data.text import TokenBatch
from foresight.ops import aggregate, preference
from tests.sabotage import change, sabotaged_by, scaled, swap

FILE = json.loads(Path(__file__).with_name("trl_losses.json").read_text())
GIVEN = {name: torch.tensor(value) for name, value in FILE["inputs"].items()}
GROUP = 4
SHAPE = (2, GROUP, 6)


def _batch() -> TokenBatch:
    length = GIVEN["mask"].sum(1).long().view(2, GROUP)
    tokens = torch.zeros(SHAPE, dtype=torch.int64)
    return TokenBatch(tokens[:, 0], length[:, 0], tokens, length, GIVEN["old"].view(SHAPE), length > 0)


def _family(module, monkeypatch, **fields) -> tuple[float, torch.Tensor]:
    """What `update` makes of the rewards, then the loss at the given log-probabilities, and its gradient."""
    made = {}

    def learn(state, loss, batch, rewards, advantage, scored, weigh, *rest):
        made.update(a=advantage, w=weigh(scored))
        return {}

    monkeypatch.setattr(module, "learn", learn)
    known = GIVEN["logprob"].view(SHAPE).clone().requires_grad_()
    reference = SimpleNamespace(logprob=lambda *_: (GIVEN["reference"].view(SHAPE), None))
    state = SimpleNamespace(
        config=module.Config(max_new_tokens=6, **fields),
        policy=SimpleNamespace(logprob=lambda *_: (known, torch.zeros(SHAPE)), device=torch.device("cpu")),
        reference=reference if fields.get("kl_coef") else None,
        optimizer=None,
        step=0,
    )
    module.update(state, _batch(), GIVEN["rewards"].view(2, GROUP))
    loss, _, _ = module.loss(state, _batch(), made["a"], made["w"], GIVEN["old"].view(SHAPE))
    loss.backward()
    return loss.item(), known.grad.view(8, 6)


def _same(name: str, loss: float, grad: torch.Tensor) -> None:
    wanted = FILE["losses"][name]
    assert abs(loss - wanted["loss"]) < 1e-5
    torch.testing.assert_close(grad, torch.tensor(wanted["grad"]), atol=1e-5, rtol=1e-4)


@sabotaged_by("foresight.ops.advantage._centered", lambda f: lambda r: (1.2 * f(r)[0] + 0.1, f(r)[1]))
@pytest.mark.parametrize(
    ("name", "module", "fields"),
    [
        ("grpo", grpo, {}),
        ("grpo_kl", grpo, {"kl_coef": 0.1}),
        ("dr_grpo", dr_grpo, {}),
        ("dapo", dapo, {"overlong_filter": False, "overlong_penalty": 0.0}),
        ("cispo", cispo, {"clip_high": 4.0}),  # the weight is at most 1 + clip_high; TRL names the whole of it
        ("gspo", gspo, {}),
    ],
)
def test_the_family_of_grpo(name, module, fields, monkeypatch):
    """GRPO and its variants compared with TRL's own functions.

    Wrong: two implementations disagree, so at least one is wrong.
    Invariant: equal losses and gradients on shared inputs, to 1e-5.
    """
    _same(name, *_family(module, monkeypatch, **fields))


@sabotaged_by("foresight.ops.preference.sigmoid", scaled(1.1))
def test_dpo():
    """With label smoothing this is cDPO, which TRL 1.16 does not have: see tests/ops/test_preference.py."""
    _same("sigmoid", *_pairs("sigmoid", 0.0, False))


@sabotaged_by("foresight.ops.preference.hinge", scaled(1.1))
def test_hinge():
    _same("hinge", *_pairs("hinge", 0.0, False))


@sabotaged_by("foresight.ops.preference.ipo", scaled(1.1))
def test_ipo_is_trls_where_it_is_normalized_by_length():
    """Azar et al. 2023, eq. 17, has log-ratios of whole sequences: that is our default, and TRL's is the other."""
    _same("ipo", *_pairs("ipo", 0.0, True))
    assert abs(_pairs("ipo", 0.0, False)[0] - FILE["losses"]["ipo"]["loss"]) > 1e-3


def _side(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(x.chunk(2), 1)


def _side_by_side() -> TokenBatch:
    length, tokens = _side(GIVEN["mask"].sum(1).long()), torch.zeros(4, 2, 6, dtype=torch.int64)
    return TokenBatch(tokens[:, 0], length[:, 0], tokens, length, torch.zeros(4, 2, 6), length > 0)


def _pairs(loss: str, smoothing: float, length_normalized: bool) -> tuple[float, torch.Tensor]:
    """TRL has the chosen answers in the first half of the rows; we have them side by side, `[P, 2, T]`."""
    mask = GIVEN["mask"]
    known = (GIVEN["logprob"] * mask).clone().requires_grad_()

    batch = _side_by_side()
    state = SimpleNamespace(
        config=dpo.Config(beta=0.3, loss=loss, label_smoothing=smoothing, length_normalized=length_normalized),
        policy=SimpleNamespace(logprob=lambda _: (_side(known), None)),
        reference=SimpleNamespace(logprob=lambda _: (_side(GIVEN["reference"] * mask), None)),
    )
    value, _ = dpo.loss(state, batch, 4)
    value.backward()
    return value.item(), known.grad


@sabotaged_by("foresight.ops.preference.bradley_terry", swap("chosen", "rejected"))
@sabotaged_by("foresight.ops.preference.centering", scaled(0.5))
def test_reward_models():
    scores, batch = GIVEN["rewards"].clone().requires_grad_(), _side_by_side()
    at_end = torch.nn.functional.one_hot(batch.last(), batch.completion.shape[-1])
    state = SimpleNamespace(
        config=reward_model.Config(centering=0.1),
        scorer=SimpleNamespace(steps=lambda _: at_end * _side(scores)[..., None]),
    )
    loss, _ = reward_model.pair_loss(state, batch, GIVEN["margin"], 4)
    loss.backward()
    _same("bradley_terry", loss.item(), scores.grad[:, None])


@sabotaged_by("foresight.ops.advantage.leave_one_out", scaled(0.75))
@sabotaged_by("foresight.ops.aggregate.per_budget", scaled(1.1))
def test_rloo(monkeypatch):
    """TRL has a ratio of sequences, and its loss at ratio 1 is −mean A = 0.

    Ahmadian et al. 2024, eq. 7, decides: −1/N Σ_i A_i log π(o_i), which has the same gradient at the policy that
    sampled, where it is taken.
    """
    loss, grad = _family(rloo, monkeypatch)
    wanted = FILE["losses"]["rloo"]
    torch.testing.assert_close(grad, torch.tensor(wanted["grad"]), atol=1e-5, rtol=1e-4)
    rewards, summed, literal = GIVEN["rewards"].tolist(), (GIVEN["logprob"] * GIVEN["mask"]).sum(1).tolist(), 0.0
    for i in range(8):
        group = rewards[i // GROUP * GROUP :][:GROUP]
        literal -= (rewards[i] - (sum(group) - rewards[i]) / (GROUP - 1)) * summed[i] / 8
    assert abs(loss - literal) < 1e-5 and abs(wanted["loss"]) < 1e-6


@sabotaged_by("foresight.ops.aggregate.per_token", lambda f: lambda mask: f(torch.ones_like(mask)))
def test_sft(monkeypatch):
    mask, shape = GIVEN["mask"], (8, 1, 6)
    known = (GIVEN["logprob"] * mask).clone().requires_grad_()
    length = mask.sum(1).long()[:, None]
    tokens = torch.zeros(shape, dtype=torch.int64)
    batch = TokenBatch(tokens[:, 0], length[:, 0], tokens, length, torch.zeros(shape), length > 0)
    state = SimpleNamespace(policy=SimpleNamespace(logprob=lambda _: (known.view(shape), torch.zeros(shape))))
    made: list[torch.Tensor] = []
    monkeypatch.setattr(sft, "fit", lambda _s, _m, _b, loss, _c: made.append(loss(torch.arange(8), batch)[0]) or {})
    sft.update(state, batch)
    made[0].backward()
    _same("sft", made[0].item(), known.grad)


@sabotaged_by("foresight.ops.kl.categorical", swap("logits", "ref_logits"))
@pytest.mark.parametrize(("name", "on_policy"), [("gkd_reverse", True), ("gkd_forward", False)])
def test_distillation(name, on_policy):
    """The two ends of GKD (Agarwal et al. 2023, eq. 1): on-policy we have KL(π ‖ π_T), else KL(π_T ‖ π)."""
    batch = _batch()
    student = GIVEN["student"].clone().requires_grad_()

    def model(logits: torch.Tensor) -> SimpleNamespace:
        at = logits.view(*SHAPE, -1)
        return SimpleNamespace(contexts=lambda few: few.mask, logits=lambda mask: at[mask], precision=nullcontext)

    state = SimpleNamespace(
        config=distill.Config(temperature=0.7, soft=True, on_policy=on_policy),
        policy=model(student),
        teacher=model(GIVEN["teacher"]),
    )
    weights = aggregate.per_token(batch.mask)
    loss, _, _ = distill.soft_loss(state, batch, batch.mask, weights, None)
    loss.backward()
    _same(name, loss.item(), student.grad)


@sabotaged_by("foresight.ops.policy.clipped_surrogate", change("clip_low", lambda _: 0.5))
@sabotaged_by("foresight.ops.value.clipped_loss", scaled(2.0))
def test_ppo_for_rlhf():
    """TRL 1.16 has no PPO any more: the equations at the head of `rlhf_ppo.py` decide, token by token."""
    batch, mask = _batch(), GIVEN["mask"].view(SHAPE)
    known = GIVEN["logprob"].view(SHAPE).clone().requires_grad_()
    value = (GIVEN["reference"].view(SHAPE) / 3).clone().requires_grad_()
    old, old_value = GIVEN["old"].view(SHAPE), GIVEN["old"].view(SHAPE) / 3
    advantage, target = GIVEN["student"][..., 0].view(SHAPE), GIVEN["teacher"][..., 0].view(SHAPE)
    entropy = GIVEN["teacher"][..., 1].view(SHAPE).abs()
    targets = rlhf_ppo.Targets(old, old_value, advantage, target, batch.mask)
    state = SimpleNamespace(
        config=rlhf_ppo.Config(entropy_coef=0.1, clip_ratio=0.2, clip_value=0.1),
        policy=SimpleNamespace(logprob=lambda *_: (known, entropy)),
        critic=SimpleNamespace(values=lambda _: value),
    )
    weights = aggregate.per_token(batch.mask)
    actor = rlhf_ppo.policy_loss(state, batch, targets, weights)[0]
    critic = rlhf_ppo.value_loss(state, batch, targets, weights)[0]
    wanted_actor, wanted_critic, n = 0.0, 0.0, int(mask.sum())
    logprob, predicted = known.detach(), value.detach()
    for place in mask.nonzero().tolist():
        at = tuple(place)
        rho, a = math.exp(logprob[at] - old[at]), float(advantage[at])
        wanted_actor -= (min(rho * a, min(max(rho, 0.8), 1.2) * a) + 0.1 * float(entropy[at])) / n
        v, before, goal = float(predicted[at]), float(old_value[at]), float(target[at])
        near = before + min(max(v - before, -0.1), 0.1)
        wanted_critic += 0.5 * max((v - goal) ** 2, (near - goal) ** 2) / n
    assert abs(actor.item() - wanted_actor) < 1e-5 and abs(critic.item() - wanted_critic) < 1e-5


def test_every_loss_that_dpo_may_use_is_compared():
    by_definition = {"robust"}  # in tests/ops/test_preference.py
    assert set(preference.LOSSES) - by_definition == {"sigmoid", "ipo", "hinge"}
