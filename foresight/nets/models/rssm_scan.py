"""The recurrence of `rssm.RSSM` on a CPU, differentiated by hand: the twin of the loops of `observe` and `imagine`.

A step of a small model takes less time than its calls, so this makes few of them: what does not depend on the state
before is computed for all steps at once, in the forward pass and in the backward pass, the gradients of all weights
included. The tests compare it with the loops.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foresight.nets.models.world_model import EPS, Policy


class Sizes(NamedTuple):
    """What the shapes of the weights do not tell."""

    blocks: int
    groups: int
    classes: int
    unimix: float


class Weights(NamedTuple):
    """The weights of a step, in the order of the arithmetic."""

    deter: Tensor
    deter_bias: Tensor
    deter_gain: Tensor
    stoch: Tensor
    stoch_bias: Tensor
    stoch_gain: Tensor
    mix: Tensor
    mix_bias: Tensor
    mix_gain: Tensor
    gates: Tensor
    gates_bias: Tensor
    post: Tensor
    post_bias: Tensor
    post_gain: Tensor
    logits: Tensor
    logits_bias: Tensor


class Recurrent(Protocol):
    """The parts of an RSSM that a step uses."""

    blocks: int
    groups: int
    classes: int
    unimix: float
    from_deter: Any
    from_stoch: Any
    mix: Any
    mix_norm: Any
    gates: Any
    post_deter: Any
    post_norm: Any
    post_logits: Any
    from_action: Any
    prior_layers: Any
    prior_logits: Any


def weights_of(model: Recurrent) -> tuple[Sizes, Weights]:
    """The weights of `model`."""
    deter, stoch = model.from_deter, model.from_stoch
    weights = Weights(
        deter[0].weight, deter[0].bias, deter[1].weight, stoch[0].weight, stoch[0].bias, stoch[1].weight,
        model.mix.weight, model.mix.bias, model.mix_norm.weight, model.gates.weight, model.gates.bias,
        model.post_deter.weight, model.post_deter.bias, model.post_norm.weight,
        model.post_logits.weight, model.post_logits.bias,
    )  # fmt: skip
    return Sizes(model.blocks, model.groups, model.classes, model.unimix), weights


def scan(
    model: Recurrent, deter: Tensor, stoch: Tensor, inputs: Tensor, tokens: Tensor, keep: Tensor, draws: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """h `[B, T, D]`, samples of z `[B, T, G C]` and their probabilities `[B, T, G, C]` of a sequence.

    From the state before it, `deter` `[B, D]` and `stoch` `[B, G C]`; what the actions before each step give to the
    recurrence, `inputs` `[B, T, H]`; what the observations give to the posterior, `tokens` `[B, T, H]`; 0 in `keep`
    `[B, T]` where the state is reset first; uniform `draws` `[B, T, G]`, or None for the mode.
    """
    sizes, weights = weights_of(model)
    h, z, probs = _Scan.apply(deter, stoch, inputs, tokens, keep, draws, sizes, *weights)  # type: ignore[no-untyped-call]  # torch's
    return h.transpose(0, 1), z.transpose(0, 1), probs.transpose(0, 1)


def rollout(
    model: Recurrent, deter: Tensor, stoch: Tensor, policy: Policy, draws: Tensor, generator: torch.Generator
) -> tuple[Tensor, list[Tensor]]:
    """Features `[N, H + 1, F]` of the states that `policy` imagines from the first one, and its H actions. No gradient.

    `draws` `[N, H, G]` are uniform, one for each categorical of the prior.
    """
    from foresight.ops.fused import latent as fused_latent  # late: numba is slow to import

    sizes, weights = weights_of(model)
    cell = Cell(sizes, weights)
    rows, horizon, _ = draws.shape
    features = deter.new_empty(rows, horizon + 1, deter.shape[1] + stoch.shape[1])
    h, z = features.split([deter.shape[1], stoch.shape[1]], -1)
    h[:, 0], z[:, 0] = deter, stoch
    deter, stoch = deter.contiguous(), torch.empty_like(stoch, memory_format=torch.contiguous_format).copy_(stoch)
    actions = []
    for t in range(horizon):
        actions.append(policy(features[:, t]).sample(generator))
        chosen = model.from_action(policy.action_features(actions[-1]))
        deter = cell(deter, stoch, torch.addmm(cell.mix_bias, chosen, cell.action), torch.empty_like(deter))[0]
        logits = model.prior_logits(model.prior_layers(deter))
        fused_latent.one_hots(logits, draws[:, t], sizes.groups, sizes.unimix, stoch)
        h[:, t + 1], z[:, t + 1] = deter, stoch
    return features, actions


class Cell:
    """One step of h for many rows, with the weights in the layouts that the products want."""

    def __init__(self, sizes: Sizes, weights: Weights) -> None:
        self.sizes, self.weights = sizes, Weights(*(x.detach() for x in weights))
        w = self.weights
        self.width, self.part = w.deter.shape[0], w.mix.shape[-1]  # of a hidden layer, and of a block
        self.own, shared = w.mix[:, : self.part], w.mix[:, self.part :]
        shared = shared.transpose(0, 1).reshape(3 * self.width, -1)  # all blocks read the same: one product
        self.latent, self.action = shared.split([2 * self.width, self.width])
        self.mix_bias = w.mix_bias.flatten()
        self.gains = torch.stack([w.deter_gain, w.stoch_gain])

    def __call__(self, deter: Tensor, stoch: Tensor, mixed: Tensor, h: Tensor) -> list[Tensor]:
        """Write h `[N, D]`; returns it and what the backward pass reads. All are contiguous.

        `mixed` `[N, D]` holds the bias and the action's part of the mixture; the others are added to it.
        """
        from foresight.ops.fused import latent as fused_latent  # late: numba is slow to import

        w, rows, blocks, part = self.weights, len(deter), self.sizes.blocks, self.part
        u = deter.new_empty(rows, 2, self.width)
        torch.addmm(w.deter_bias, deter, w.deter.t(), out=u[:, 0])
        torch.addmm(w.stoch_bias, stoch, w.stoch.t(), out=u[:, 1])
        hidden = fused_latent.norm_silu_rows(u, self.gains, EPS)
        mixed.addmm_(hidden.flatten(1), self.latent)
        own = deter.view(rows, blocks, part).transpose(0, 1)
        mixed.view(rows, blocks, part).transpose(0, 1).baddbmm_(own, self.own)
        x = fused_latent.norm_silu_rows(mixed.unsqueeze(1), w.mix_gain.unsqueeze(0), EPS).squeeze(1)
        gates = torch.baddbmm(w.gates_bias, x.view(rows, blocks, part).transpose(0, 1), w.gates)
        fused_latent.gated(gates, deter, h)
        return [h, u, hidden, mixed, x, gates]


class _Scan(torch.autograd.Function):
    """See `scan`; time comes first inside. The names of gradients begin with d."""

    @staticmethod
    def forward(
        ctx: Any, deter: Tensor, stoch: Tensor, inputs: Tensor, tokens: Tensor, keep: Tensor, draws: Tensor | None,
        sizes: Sizes, *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        w = Weights(*weights)
        from foresight.ops.fused import latent as fused_latent  # late: numba is slow to import

        cell = Cell(sizes, w)
        batch, steps, _ = inputs.shape
        mixed = cell.mix_bias + inputs.transpose(0, 1) @ cell.action
        tokens = tokens.transpose(0, 1) + w.post_bias
        h, z = inputs.new_empty(steps, batch, deter.shape[1]), inputs.new_empty(steps, batch, stoch.shape[1])
        kept = keep.t().unsqueeze(-1)
        reset = (keep == 0).any(0).tolist()
        tape: list[list[Tensor]] = []
        before, latent = deter.contiguous(), stoch.contiguous()
        for t in range(steps):
            if reset[t]:
                before, latent = before * kept[t], latent * kept[t]
            held = cell(before, latent, mixed[t], h[t])
            post = torch.addmm(tokens[t], h[t], w.post.t())
            x = fused_latent.norm_silu_rows(post.unsqueeze(1), w.post_gain.unsqueeze(0), EPS).squeeze(1)
            logits = torch.addmm(w.logits_bias, x, w.logits.t())
            drawn = None if draws is None else draws[:, t]
            probs = fused_latent.one_hots(logits, drawn, sizes.groups, sizes.unimix, z[t])
            tape.append([*held[1:3], *held[4:], post, x, probs])
            before, latent = h[t], z[t]
        stacked = [torch.stack(parts) for parts in zip(*tape, strict=True)]
        ctx.save_for_backward(deter, stoch, kept, inputs, h, z, mixed, *stacked, *weights)
        ctx.cell, ctx.reset = cell, reset
        return h, z, stacked[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dz: Tensor, dprobs: Tensor) -> tuple[Tensor | None, ...]:
        deter, stoch, kept, inputs, h, z, mixed, *saved = ctx.saved_tensors
        u, hidden, x, gates, post, post_x, probs, *weights = saved
        cell, w = ctx.cell, Weights(*weights)
        sizes, width, part = cell.sizes, cell.width, cell.part
        steps, batch, size = h.shape
        before = torch.cat([deter.unsqueeze(0), h[:-1]]) * kept
        latent = torch.cat([stoch.unsqueeze(0), z[:-1]]) * kept
        own = before.view(steps, batch, sizes.blocks, part)

        # The slopes of everything that is not a product, of all steps at once.
        slope, unit, direct = _slopes(u, cell.gains)
        mix_slope, mix_unit, mix_direct = _slopes(mixed, w.mix_gain)
        post_slope, post_unit, post_direct = _slopes(post, w.post_gain)
        reset, candidate, update = gates.view(steps, sizes.blocks, batch, 3, part).transpose(1, 2).unbind(3)
        reset, update = reset.sigmoid(), (update - 1).sigmoid()
        new = (reset * candidate).tanh()
        through = update * (1 - new.square())
        gate_slope = torch.stack(
            [through * candidate * reset * (1 - reset), through * reset, (new - own) * update * (1 - update)], 3
        )
        stays = (1 - update).flatten(2)
        softmax = (probs - sizes.unimix / sizes.classes) / (1 - sizes.unimix)
        scaled = softmax * (1 - sizes.unimix)

        dlatent = torch.zeros_like(stoch)  # of z and h of the step before
        dbefore = torch.zeros_like(deter)
        through_own, through_gates = cell.own.transpose(1, 2), w.gates.transpose(1, 2)
        through_latent = cell.latent.t()
        dprobs = dprobs + dz.view(probs.shape)  # straight-through: the sample has the gradient of the probabilities
        tape: list[tuple[Tensor, ...]] = []
        for t, resets in reversed(list(enumerate(ctx.reset))):
            dp = scaled[t] * (dprobs[t] + dlatent.view(probs.shape[1:]))
            dlogits = torch.addcmul(dp, softmax[t], dp.sum(-1, keepdim=True), value=-1).flatten(1)
            dpost_x = dlogits @ w.logits
            dpost = _norm_backward(dpost_x, post_slope[t], post_unit[t])
            total = torch.addmm(dbefore + dh[t], dpost, w.post)
            dgates = (gate_slope[t] * total.view(batch, sizes.blocks, 1, part)).view(batch, sizes.blocks, -1)
            dx = torch.bmm(dgates.transpose(0, 1), through_gates).transpose(0, 1).reshape(batch, size)
            dmixed = _norm_backward(dx, mix_slope[t], mix_unit[t])
            dhidden = (dmixed @ through_latent).view(batch, 2, width)
            du = _norm_backward(dhidden, slope[t], unit[t])
            dbefore = (total * stays[t]).addmm_(du[:, 0], w.deter)
            blocks = dbefore.view(batch, sizes.blocks, part).transpose(0, 1)
            blocks.baddbmm_(dmixed.view(batch, sizes.blocks, part).transpose(0, 1), through_own)
            dlatent = du[:, 1] @ w.stoch
            if resets:
                dbefore, dlatent = dbefore * kept[t], dlatent * kept[t]
            tape.append((dlogits, dpost_x, dpost, dgates, dx, dmixed, dhidden, du))
        dlogits, dpost_x, dpost, dgates, dx, dmixed, dhidden, du = (
            torch.stack(parts[::-1]) for parts in zip(*tape, strict=True)
        )

        gains = (dhidden * direct).sum((0, 1))
        shared = torch.cat([hidden.flatten(2), inputs.transpose(0, 1)], 2).flatten(0, 1)
        dmix = torch.cat([
            _products(own, dmixed.view(own.shape)),
            (shared.t() @ dmixed.flatten(0, 1)).view(-1, sizes.blocks, part).transpose(0, 1),
        ], 1)  # fmt: skip
        by_row = [
            du[:, :, 0].flatten(0, 1).t() @ before.flatten(0, 1), du[:, :, 0].sum((0, 1)), gains[0],
            du[:, :, 1].flatten(0, 1).t() @ latent.flatten(0, 1), du[:, :, 1].sum((0, 1)), gains[1],
            dmix, dmixed.sum((0, 1)).view(w.mix_bias.shape), (dx * mix_direct).sum((0, 1)),
            _products(x.view(own.shape), dgates), dgates.sum((0, 1)).unsqueeze(1),
            dpost.flatten(0, 1).t() @ h.flatten(0, 1), dpost.sum((0, 1)), (dpost_x * post_direct).sum((0, 1)),
            dlogits.flatten(0, 1).t() @ post_x.flatten(0, 1), dlogits.sum((0, 1)),
        ]  # fmt: skip
        dinputs, dtokens = (dmixed @ cell.action.t()).transpose(0, 1), dpost.transpose(0, 1)
        return dbefore, dlatent, dinputs, dtokens, None, None, None, *by_row


def _slopes(u: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of silu(y), y = gain · û, û = u / rms(u): its slope times gain / rms(u), û, and its slope times û."""
    scale = (u.square().mean(-1, keepdim=True) + EPS).rsqrt()
    unit = u * scale
    y = unit * gain
    gate = y.sigmoid()
    slope = gate * (1 + y * (1 - gate))
    return slope * gain * scale, unit, slope * unit


def _norm_backward(grad: Tensor, slope: Tensor, unit: Tensor) -> Tensor:
    """The gradient of u from that of silu(gain · u / rms(u)), see `_slopes`."""
    along = grad * slope
    return torch.addcmul(along, unit, (along * unit).mean(-1, keepdim=True), value=-1)


def _products(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient `[blocks, in, out]` of block weights from inputs and gradients `[T, B, blocks, ...]`."""
    return x.flatten(0, 1).permute(1, 2, 0) @ grad.flatten(0, 1).transpose(0, 1)
