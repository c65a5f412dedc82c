"""Advantages from rewards alone: how much better a step or a completion was than its group.

Groups are `[P, G]`: P prompts (or start states), G samples of each. A reward of NaN means "could not be
scored": it is left out of the group's baseline and gets advantage 0. A group whose rewards are all equal
gives no gradient: its advantages are exactly 0, also if its mean is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresight.errors import UserError


def normalize(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit standard deviation over all unmasked entries: (x - mean) / (std + eps).

    Shapes: x, mask any one shape (mask None: no entry is masked); returns the same shape, 0 where mask is
    0, and 0 everywhere if all entries are equal. The standard deviation is the unbiased one, and 0 for a single entry.
    As in the code of PPO (Huang et al. 2022, "The 37 implementation details of PPO", detail 7).
    """
    if mask is None:
        # Compared with the first, not std == 0: the mean of equal values may round to another value.
        equal = (x == x.flatten()[:1]).all()
        centered, count = (x - x.mean()).masked_fill(equal, 0), x.numel()
        return centered / ((centered.square().sum() / max(count - 1, 1)).sqrt() + eps)
    masked = mask == 0
    filled = x.masked_fill(masked, 0)
    total = (~masked).sum()
    equal = x.masked_fill(masked, -torch.inf).amax() <= x.masked_fill(masked, torch.inf).amin()
    centered = (filled - filled.sum() / total.clamp(min=1)).masked_fill(masked | equal, 0)
    return centered / ((centered.square().sum() / (total - 1).clamp(min=1)).sqrt() + eps)


def group_centered(rewards: Tensor) -> Tensor:
    """A = r - mean of the group.

    Shapes: rewards `[P, G]`; returns `[P, G]`. Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), §3.2.
    """
    return _centered(rewards)[0]


def group_scaled(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """A = (r - mean of the group) / (std of the group + eps).

    Shapes: rewards `[P, G]`; returns `[P, G]`. The standard deviation is the unbiased one, as in TRL, and so
    is the eps. Source: GRPO, Shao et al. 2024 (arXiv:2402.03300), §4.1.2.
    """
    centered, count = _centered(rewards)
    variance = centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    return centered / (variance.sqrt() + eps)


def batch_scaled(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """A = (r - mean of the group) / (std of all centered rewards of the batch + eps).

    Shapes: rewards `[P, G]`; returns `[P, G]`. Hard and easy prompts, whose groups differ little, keep their small
    gradient. The standard deviation is the unbiased one. Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262).

    Becomes `group_scaled` when there is one group.
    """
    centered = _centered(rewards)[0]
    count = (~rewards.isnan()).sum()
    return centered / ((centered.square().sum() / (count - 1).clamp(min=1)).sqrt() + eps)


def mean_scaled(rewards: Tensor) -> Tensor:
    """A = (r - mean of the group) / mean of the group, for rewards of at least 0; 0 where the mean is 0.

    Shapes: rewards `[P, G]`; returns `[P, G]`. Where r is 1 or 0 and p the chance of 1, the gradient is that of log p
    instead of p, to the order G - 1: a rare success weighs 1 / p times as much, so that what helps most prompts does
    not drown what the others need. Source: MaxRL, Tajwar et al. 2026 (arXiv:2602.02710), algorithm 1.
    Raises UserError for a reward below 0.
    """
    if bool((rewards < 0).any()):
        raise UserError("Rewards are divided by their mean only if they are at least 0. Set --scale group")
    mean = (1.0 * rewards).nanmean(1, keepdim=True)
    return torch.where(mean > 0, _centered(rewards)[0] / mean, 0)


def leave_one_out(rewards: Tensor) -> Tensor:
    """A = r - mean of the others in the group = n / (n - 1) · (r - mean of the group), n the number scored.

    Shapes: rewards `[P, G]`; returns `[P, G]`; 0 where there are no others. Source: RLOO, Kool et al. 2019;
    Ahmadian et al. 2024 (arXiv:2402.14740), §3.
    """
    centered, count = _centered(rewards)
    return centered * count / (count - 1).clamp(min=1)


def differs(rewards: Tensor) -> Tensor:
    """Whether a group has two scored rewards that differ: only such a group gives a gradient.

    Shapes: rewards `[P, G]`; returns `[P]`, bool. The condition of DAPO's dynamic sampling, Yu et al. 2025
    (arXiv:2503.14476), eq. 11.
    """
    scored = ~rewards.isnan()
    highest, lowest = torch.where(scored, rewards, -torch.inf), torch.where(scored, rewards, torch.inf)
    return highest.amax(1) > lowest.amin(1)


def overlong(length: Tensor, limit: int, buffer: int) -> Tensor:
    """Penalty for a completion near the length limit: 0, then linearly down to -1 over the last `buffer` tokens.

        0 where |o| ≤ limit - buffer,    ((limit - buffer) - |o|) / buffer beyond

    Shapes: length `[P, G]` (tokens); returns `[P, G]`. Source: DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 13.
    """
    return ((limit - buffer - length) / buffer).clamp(-1, 0)


def learnability(right: Tensor, wrong: Tensor) -> Tensor:
    """How much a group of completions of a prompt may teach: p (1 - p) of its success rate p, `[N]`.

    Shapes: right, wrong `[N]`, the numbers of completions so far. Half a completion of each kind is added, so that a
    prompt without completions has the largest value, and none has 0. This is the variance of rewards of 0 and 1: a
    group whose rewards are all equal has no gradient. Source: Foster et al. 2025 (arXiv:2502.12272).
    """
    rate = (right + 0.5) / (right + wrong + 1)
    return rate * (1 - rate)


def _centered(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """`(r - mean over the scored ones [P, G], how many were scored [P, 1])`."""
    scored = ~rewards.isnan()
    count = scored.sum(1, keepdim=True)
    filled = rewards.masked_fill(~scored, 0)
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    # Rewards may be integers, which masked_fill would refuse to fill with infinity.
    highest = torch.where(scored, rewards, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(scored, rewards, torch.inf).amin(1, keepdim=True)
    # highest <= lowest, not std == 0: the mean of equal values may round to another value.
    return (filled - mean).masked_fill(~scored | (highest <= lowest), 0), count


SCALES = ("group", "batch", "mean", "none")  # GRPO's choices


def scaled(rewards: Tensor, scale: str) -> Tensor:
    """`group_scaled`, `batch_scaled`, `mean_scaled` or `group_centered`, by the name of the scale. Shapes: `[P, G]`."""
    by_name = {"group": group_scaled, "batch": batch_scaled, "mean": mean_scaled, "none": group_centered}
    return by_name[scale](rewards)
