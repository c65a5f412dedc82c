"""Learning from what follows a turn: OpenClaw-RL (2026), with its evaluative and its directive signal.

Each turn o_1..o_T was sampled by π_old (its stored log-probabilities) and has a score r, a hint h, or both:

    A_t = w_r r  +  w_h clip( log π_θ'(o_t | x, h, o_<t) − log π_old(o_t | x, o_<t), ±c )
    J(θ) = mean over turns of 1/T Σ_t  min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε') A_t) − β k2(π_θ, π_ref)
           − β' mean over rehearsed turns of 1/T Σ_t KL(π_ref ‖ π_θ)

The first term is evaluative; the second is hindsight: the model before the update (θ') reads the hint at the end of the
user's message and scores the turn it wrote without. With `hint_top_k` K the second term is no advantage, but −w_h
KL(π_θ ‖ π_h) at every token, over the K likeliest tokens of π_h and all others as one. The teacher π_h is π_θ'(· | x,
h, o_<t) or, with `hint_guidance` c, ∝ π_θ'(· | x, o_<t)^{1-c} π_θ'(· | x, h, o_<t)^c, which exaggerates what the hint
changes (own: a small model hardly follows a hint; the formula is that of classifier-free guidance, Ho & Salimans 2022,
arXiv:2207.12598). Kept: PPO's asymmetric clip, no normalization of r, on-policy distillation, on the sampled tokens
with a clipped difference or over the K likeliest. Left out: steps of one task. Added: the last term, on answers of the
first version (π_ref) to questions that no user asks: what it knew is rehearsed, as in Learning without Forgetting (Li &
Hoiem 2016, arXiv:1606.09282). β' is 0 unless given.

The ids that were sampled are trained on, never a text that is tokenized again; ρ corrects for the weights that sampled.
An update whose policy is further from the first version than `kl_bound` is undone: no user can move it beyond.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from foresight.agents.live.settings import Config
from foresight.agents.live.store import Turn
from foresight.data.text import TokenBatch
from foresight.nets.language.model import LanguageModel
from foresight.ops import kl
from foresight.ops.policy import clipped_surrogate, ratio
from foresight.planning.generation.dialogue import as_data
from foresight.planning.generation.rollout import complete

HINT = "\n[user's hint: {hint}]"


def update(
    policy: LanguageModel,
    reference: LanguageModel,
    optimizer: torch.optim.Optimizer,
    turns: Sequence[Turn],
    config: Config,
    rehearsed: Sequence[Turn] = (),
) -> dict[str, float]:
    """One gradient step on `turns`; undone, with `rejected` 1, if it leaves the bound to the first version.

    `rehearsed` are answers of the first version, as `answers` makes them.
    """
    advantages = [advantage(policy, turn, config) for turn in turns]  # all before the step: θ' is one policy
    hinted = [_likeliest(policy, turn, config) for turn in turns]
    optimizer.zero_grad()
    total, count, used = 0.0, 0, [i for i in range(len(turns)) if advantages[i] is not None or hinted[i] is not None]
    for i in used:
        batch, found, teacher = _batch(turns[i]), advantages[i], hinted[i]
        own = _next(policy, batch, turns[i].temperature)
        logprob = own.gather(-1, batch.completion[0, 0, :, None].to(own.device))[:, 0]
        with torch.no_grad():
            ref = reference.logprob(batch, turns[i].temperature)[0][0, 0]
        terms = config.kl_coef * kl.k2(logprob, ref)
        if found is not None:
            rho = ratio(logprob, batch.logprob[0, 0].to(logprob.device))
            terms = terms + clipped_surrogate(rho, found.to(logprob.device), config.clip_low, config.clip_high)
        if teacher is not None:
            terms = terms + config.hint_weight * kl.likeliest(own.gather(-1, teacher.indices), teacher.values)
        loss = terms.mean() / len(used)
        loss.backward()
        total, count = total + loss.item(), count + logprob.numel()
    kept = 0.0
    for turn in rehearsed if used and config.rehearsal else ():
        distance = _forward_kl(policy, reference, turn) / len(rehearsed)
        (config.rehearsal * distance).backward()
        kept += distance.item()
    scores = [turn.score for turn in turns if turn.score is not None]
    metrics = {
        "loss": total, "turns": float(len(used)), "tokens": float(count),
        "score": sum(scores) / len(scores) if scores else 0.0,
        "hints": sum(bool(turn.hint) for turn in turns) / len(turns), "rejected": 0.0, "kl": 0.0,
        **({"rehearsal_kl": kept} if rehearsed else {}),
    }  # fmt: skip
    if not used:
        return metrics
    trained = list(_trained(optimizer))
    before, moments = [weight.detach().clone() for weight in trained], copy.deepcopy(optimizer.state_dict())
    torch.nn.utils.clip_grad_norm_(trained, config.tuning.max_grad_norm)
    optimizer.step()
    metrics["kl"] = divergence(policy, reference, [turns[i] for i in used])
    if not metrics["kl"] <= config.kl_bound:  # also for NaN
        with torch.no_grad():
            for weight, old in zip(trained, before, strict=True):
                weight.copy_(old)
        optimizer.load_state_dict(moments)  # with those of this step, the next one would still move in its direction
        metrics["rejected"] = 1.0
    return metrics


def advantage(policy: LanguageModel, turn: Turn, config: Config) -> Tensor | None:
    """A_t of a turn's tokens `[T]`; None where there is none: no score but 0, and no hint that is an advantage."""
    found = torch.zeros(len(turn.tokens))
    if config.mode != "directive" and turn.score:
        found += config.score_weight * turn.score
    if not config.hint_top_k and (hinted := _hinted(policy, turn, config)) is not None:
        with torch.no_grad():
            teacher = policy.logprob(hinted, turn.temperature)[0][0, 0].cpu()
        difference = teacher - torch.tensor(turn.logprob)
        found += config.hint_weight * difference.clamp(-config.hint_clip, config.hint_clip)
    return found if bool(found.any()) else None


@torch.no_grad()
def _likeliest(policy: LanguageModel, turn: Turn, config: Config) -> torch.return_types.topk | None:
    """The K likeliest next tokens of the teacher, log-probabilities and ids `[T, K]`; None without hint or K."""
    hinted = _hinted(policy, turn, config) if config.hint_top_k else None
    if hinted is None:
        return None
    teacher = _next(policy, hinted, turn.temperature)
    if config.hint_guidance != 1:
        plain = _next(policy, _batch(turn), turn.temperature)
        teacher = torch.lerp(plain, teacher, config.hint_guidance).log_softmax(-1)
    return teacher.topk(min(config.hint_top_k, teacher.shape[-1]))


def _next(model: LanguageModel, batch: TokenBatch, temperature: float) -> Tensor:
    """Log-probabilities `[T, V]` of all tokens where those of one turn stand."""
    with model.precision():
        logits = model.logits(model.contexts(batch))
    return (logits.float() / temperature).log_softmax(-1)


@torch.no_grad()
def divergence(policy: LanguageModel, reference: LanguageModel, turns: Sequence[Turn]) -> float:
    """KL(policy ‖ reference) where the tokens of turns stand, over all next tokens, in nats per token."""
    found = []
    for turn in turns:
        with policy.precision():
            ours, theirs = (m.logits(m.contexts(_batch(turn))).float() for m in (policy, reference))
        found.append(kl.categorical(ours, theirs))
    return torch.cat(found).mean().item()


def answers(model: LanguageModel, questions: Sequence[Any], max_new_tokens: int = 32) -> list[Turn]:
    """Greedy answers of a model to examples of a text task, as turns to rehearse."""
    batch = complete(model, questions, 1, max_new_tokens, 0.0)
    rows = zip(batch.prompts(), batch.completion[:, 0].tolist(), batch.length[:, 0].tolist(), strict=True)
    return [Turn("", 0, [], "", prompt, row[:n], [0.0] * n) for prompt, row, n in rows]


def _forward_kl(policy: LanguageModel, reference: LanguageModel, turn: Turn) -> Tensor:
    """KL(reference ‖ policy) over all next tokens of a turn, in nats per token."""
    batch = _batch(turn)
    with policy.precision():
        ours = policy.logits(policy.contexts(batch)).float()
        with torch.no_grad():
            theirs = reference.logits(reference.contexts(batch)).float()
    return kl.categorical(theirs, ours).mean()


def _hinted(policy: LanguageModel, turn: Turn, config: Config) -> TokenBatch | None:
    """The turn's tokens after its conversation with the hint; None without hint, user's message, or room."""
    if config.mode == "evaluative" or not turn.hint:
        return None
    places = [i for i, message in enumerate(turn.messages) if message["role"] == "user"]
    if not places:
        return None
    messages = [dict(message) for message in turn.messages]
    asked = messages[places[-1]]
    messages[places[-1]] = as_data(policy, {**asked, "content": asked["content"] + HINT.format(hint=turn.hint)})
    prompt = policy.encode(messages)
    return None if len(prompt) + len(turn.tokens) > policy.context else _batch(turn, prompt)


def _batch(turn: Turn, prompt: list[int] | None = None) -> TokenBatch:
    prompt = turn.prompt if prompt is None else prompt
    return TokenBatch(
        torch.tensor([prompt]), torch.tensor([len(prompt)]), torch.tensor([[turn.tokens]]),
        torch.tensor([[len(turn.tokens)]]), torch.tensor([[turn.logprob]], dtype=torch.float32), torch.tensor([[True]]),
    )  # fmt: skip


def _trained(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])
