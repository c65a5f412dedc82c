"""Where attention is read: language models on a text, and the networks of runs in their environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foresight.data.trajectory import Tree, tree_map
from foresight.envs.images.make import Images
from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.tokenizer import ids_of
from foresight.nets.sequence.attention import KnockOut, recorded
from foresight.nets.sequence.decision import DecisionTransformer
from foresight.nets.sequence.denoisers import DenoisingTransformer
from foresight.nets.sequence.gtrxl import GTrXL
from foresight.nets.sequence.swin import Swin, SwinBlock
from foresight.nets.sequence.trajectory import TrajectoryTransformer
from foresight.nets.sequence.transformer import Transformer
from foresight.nets.sequence.vit import ViT, pixels
from foresight.nets.sequence.vla import VLA
from foresight.nets.sequence.vla_actor_critic import VLAActorCritic
from foresight.nets.sequence.window import Window
from foresight.runtime import machine
from foresight.runtime.agent import Agent
from foresight.runtime.attention.maps import Maps, Pass

KINDS: tuple[Any, ...] = (
    DecisionTransformer, VLAActorCritic, VLA, TrajectoryTransformer, DenoisingTransformer, GTrXL, Window, Transformer,
    ViT, Swin,
)  # fmt: skip
Call = tuple[tuple[Any, ...], dict[str, Any]]
LONGEST = 512  # tokens of a text: weights grow with the square


def of_text(model: LanguageModel, text: str, title: str = "") -> Maps:
    """The attention of a language model while it reads `text`. Raises UserError for an empty or a long text."""
    from foresight.nets.language import recording

    ids = ids_of(model.tokenizer, text)
    most = min(LONGEST, model.context)
    if not 1 <= len(ids) <= most:
        raise UserError(f"The text has {len(ids)} tokens. Give one of 1 to {most}, with --text.")
    tokens = torch.tensor([ids], device=model.device)

    def again(knock_outs: Sequence[KnockOut]) -> tuple[list[Tensor], Tensor]:
        weights, output = recording.read(model.module, tokens, knock_outs)
        return [layer[0].float().cpu() for layer in weights], output[0].float().cpu()

    weights, output = again(())
    return Maps(
        title or text,
        tuple(model.tokenizer.decode([i]) for i in ids),
        tuple(weights),
        output,
        again,
        probabilities=True,
        names=lambda i: str(model.tokenizer.decode([i])),
        targets=torch.tensor([*ids[1:], -1]),
    )


def of_module(net: nn.Module, *inputs: Any, title: str = "", tokens: Sequence[str] = (), **options: Any) -> Maps:
    """The attention of any network of this package in `net(*inputs, **options)`, of batch row 0.

    `tokens` are names of the keys; by default their numbers. Its output is the first tensor of the result. Raises
    UserError if the network calls no attention.
    """
    again = passes(net, inputs, options)
    weights, output = again(())
    keys = weights[0].shape[-1]
    names = tuple(tokens) or tuple(str(i) for i in range(keys))
    if len(names) != keys:
        raise UserError(f"{len(names)} names are given for {keys} tokens.")
    return Maps(title or type(net).__name__, names, tuple(weights), output, again)


def of_image(net: ViT | Swin, image: Tensor, title: str = "", whole: nn.Module | None = None) -> Maps:
    """The attention of a vision transformer on an image `[C, H, W]`: of the class token (ViT), or within windows.

    The weights of windows are written into one matrix over all patches of the layer; what padding gets is left out.
    The output is that of `whole`, a network of which `net` is a part; by default of `net`.
    """
    shown, whole = (pixels(image)[0] * 255).to(torch.uint8).cpu(), net if whole is None else whole
    if isinstance(net, ViT):
        found = of_module(whole, image.unsqueeze(0), title=title, tokens=["class", *_patches(net.rows, net.columns)])
        grids = tuple((net.rows, net.columns) for _ in found.weights)
        return dataclasses.replace(found, image=shown, grids=grids, skipped=1)
    blocks = [layer for layer in net.layers if isinstance(layer, SwinBlock)]
    windowed = passes(whole, (image.unsqueeze(0),), {})

    def again(knock_outs: Sequence[KnockOut]) -> tuple[list[Tensor], Tensor]:
        if any(one.query is not None or one.key is not None for one in knock_outs):
            raise UserError("Single links cannot be knocked out of a Swin Transformer: its windows are apart.")
        weights, output = windowed(knock_outs)
        return [_whole(x, block) for x, block in zip(weights, blocks, strict=True)], output

    weights, output = again(())
    grids = tuple((block.height, block.width) for block in blocks)
    return Maps(title or "Swin", tuple(_patches(*grids[0])), tuple(weights), output, again, image=shown, grids=grids)


def of_vla(net: VLA, obs: Tree, title: str = "") -> Maps:
    """The attention of a VLA on observations `[1, ...]`: of its tokens of images, states, words and actions.

    Tokens that are not seen, such as those of a missing camera, are left out. The output is the logits of the action
    tokens (those before have none: zeros), or, of a flow, the features that it starts from.
    """
    names, seen = net.tokens(obs)
    tokens = net.config.head != "flow"
    every = passes(net, (obs,), {}, lambda output: output.tokens.logits if tokens else output.hidden)
    skipped = len(every(())[0]) - net.config.layers  # of Vision Transformers, which look first

    def again(knock_outs: Sequence[KnockOut]) -> tuple[list[Tensor], Tensor]:
        weights, output = every([one._replace(layer=one.layer + skipped) for one in knock_outs])
        return weights[skipped:], output

    weights, output = again(())
    found = Maps(title or "VLA", tuple(names), tuple(weights), output, again)
    found = _only(found, seen.nonzero().flatten().tolist(), [x for x, real in zip(names, seen, strict=True) if real])
    kind = "bin" if net.actions.continuous else "action"
    return dataclasses.replace(found, probabilities=tokens, names=lambda i: f"{kind} {i}")


def of_run(agent: Agent, steps: int = 20, seed: int = 0, images: bool = False) -> Maps:
    """The attention of a run's network after `steps` greedy steps in its environment (fewer, if the episode ends).

    A memory shows all these steps, a Decision Transformer, a Trajectory Transformer or a world model the window that it
    reads, a VLA the last observation, a diffusion policy its last pass over the last chunk, and a vision transformer
    (`images`, or if there is nothing else) the last image. A classifier shows the held-out image `seed`. Raises
    UserError if there is no attention.
    """
    nets = _attentive(agent, images)
    title = f"{agent.settings.algorithm} on {agent.settings.env}"
    if isinstance(agent.env, Images):
        return _of_held_out(agent, nets[0], title, seed)
    net, calls = _calls(agent, nets, steps, seed)
    inputs, options = calls[-1]
    if isinstance(net, VLA | VLAActorCritic):
        vla = net.vla if isinstance(net, VLAActorCritic) else net
        return of_vla(vla, tree_map(lambda x: x[:1], inputs[0]), title)
    if isinstance(net, TrajectoryTransformer):  # the last prompt; single tokens of the beam follow it
        (x, *_), options = [call for call in calls if call[0][0].shape[1] > 1][-1]
        return _of_prompt(net, x[:1], options["mask"], title)
    if isinstance(net, ViT | Swin):
        images_ = inputs[0].reshape(-1, *inputs[0].shape[-3:])
        return of_image(net, images_[-1], title)
    if isinstance(net, GTrXL | Window):
        x = torch.cat([x for (x, *_), _ in calls], 1)[:1]
        found = of_module(net, x, net.initial(1), title=title)
        count = x.shape[1]
        return _last(found, count, [f"t={t}" for t in range(count)])
    found = of_module(net, *_first_row(inputs), **_first_row(options), title=title)
    if isinstance(net, DecisionTransformer):
        real = int(options["mask"][0].sum())
        times = [int(t) for t in options["time"][0][-real:]]
        found = _last(found, 3 * real, [f"{what} {t}" for t in times for what in ("return", "obs", "action")])
        return dataclasses.replace(found, probabilities=net.actions.discrete, names=lambda i: f"action {i}")
    if isinstance(net, DenoisingTransformer):
        chunk, _, seen = inputs
        past = seen.shape[1] - 1
        names = [*(f"obs t-{past - i}" for i in range(past)), "obs t"]
        names = ["level", *names, *(f"action {i}" for i in range(chunk.shape[1]))]
        return dataclasses.replace(found, tokens=tuple(names))
    return _filled(found, options)


def _of_held_out(agent: Agent, net: Any, title: str, index: int) -> Maps:
    env, device = agent.env, machine.device_of(agent.state)
    if not 0 <= index < len(env.test):
        raise UserError(f"There is no held-out image {index}. Choose one from 0 to {len(env.test) - 1} with --seed.")
    title = f"{title}, held-out image {index}: {env.classes[int(env.test_label[index])]}"
    found = of_image(net, env.test[index].to(device), title, agent.state.network)
    return dataclasses.replace(found, probabilities=True, names=lambda i: str(env.classes[i]))


def _of_prompt(net: TrajectoryTransformer, x: Tensor, mask: Tensor | None, title: str) -> Maps:
    """What a Trajectory Transformer reads before it plans: its last steps, and the observation of now."""
    real = x.shape[1] if mask is None else int(mask[0].sum())
    found = of_module(net.transformer, x, title=title, mask=None if mask is None else mask[:1])
    columns = [("obs", net.obs_size), ("action", net.action_size), ("reward", 1)]
    names = [name if size == 1 else f"{name}{i}" for name, size in columns for i in range(size)]
    steps = x.shape[1] // net.inputs
    every = [f"{name} t-{steps - t}" for t in range(steps) for name in names]
    return _last(found, real, [*every, *(f"{name} t" for name in names[: net.obs_size])][-real:])


def _result(output: Any) -> Tensor:
    """The first tensor of what a network returns."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def passes(
    net: nn.Module, inputs: Sequence[Any], options: dict[str, Any], read: Callable[[Any], Tensor] = _result
) -> Pass:
    """The function from knock-outs to the weights and the output of `net(*inputs, **options)`, of batch row 0.

    `read` takes the output `[B, ...]` from what the network returns.
    """

    @torch.no_grad()
    def again(knock_outs: Sequence[KnockOut]) -> tuple[list[Tensor], Tensor]:
        training = net.training
        net.eval()
        try:
            with recorded(knock_outs) as weights:
                output = net(*inputs, **options)
        finally:
            net.train(training)
        if not weights:
            raise UserError(f"{type(net).__name__} has no attention. Give a transformer, or a run that has one.")
        rows = _rows(read(output)[0].float().cpu(), weights[-1].shape[-2])
        return [layer[0].float().cpu() for layer in weights], rows

    return again


def _rows(output: Tensor, queries: int) -> Tensor:
    """Outputs as rows: one per query `[T, N]`, zeros for first ones without any; or only the last one `[1, N]`."""
    if output.dim() < 2:
        return output.reshape(1, -1)
    rows = output.flatten(1)
    return F.pad(rows, (0, 0, queries - len(rows), 0)) if len(rows) <= queries else rows[-1:]


def _whole(weights: Tensor, block: SwinBlock) -> Tensor:
    """The weights of windows `[W, heads, t, t]` over all patches of the grid, `[heads, N, N]`."""
    heads, padded_width = weights.shape[1], block.width + block.padding[1]
    count = block.tokens.numel()
    full = weights.new_zeros(heads, count, count)
    for window, tokens in zip(weights, block.tokens.cpu(), strict=True):
        full[:, tokens[:, None], tokens[None]] = window
    places = torch.arange(count).view(-1, padded_width)[: block.height, : block.width].flatten()
    return full[:, places][:, :, places]


def _patches(rows: int, columns: int) -> list[str]:
    return [f"{row},{column}" for row in range(rows) for column in range(columns)]


def _attentive(agent: Agent, images: bool) -> list[nn.Module]:
    """The networks of the run to look at, of one kind."""
    kinds = KINDS[-2:] if images else KINDS
    modules = [module for net in _networks(agent) for module in net.modules()]
    for kind in kinds:
        if found := [module for module in modules if isinstance(module, kind)]:
            return found
    what = "vision transformer: train one with --images vit" if images else "attention: train with a transformer"
    raise UserError(f"The networks of {agent.path} have no {what}.")


def _networks(agent: Agent) -> Iterator[nn.Module]:
    for field in dataclasses.fields(agent.state):
        value = getattr(agent.state, field.name)
        if isinstance(value, nn.Module):
            yield value


@torch.no_grad()
def _calls(agent: Agent, nets: Sequence[nn.Module], steps: int, seed: int) -> tuple[nn.Module, list[Call]]:
    """The arguments of each call while the agent acts, of the first of `nets` that it calls."""
    if steps < 1:
        raise UserError(f"The number of steps must be at least 1, not {steps}.")
    found: list[tuple[nn.Module, list[Call]]] = [(net, []) for net in nets]
    hooks = [
        # A Trajectory Transformer is never called as a whole, but token by token.
        (net.transformer if isinstance(net, TrajectoryTransformer) else net).register_forward_pre_hook(
            lambda _, args, kwargs, calls=calls: calls.append((args, dict(kwargs))), with_kwargs=True
        )
        for net, calls in found
    ]
    device, module, state = machine.device_of(agent.state), agent.module, agent.state
    try:
        obs, carry = agent.env.reset(seed), None
        for _ in range(steps):
            action, _, carry = module.act(state, tree_map(lambda x: x.to(device), obs), carry, explore=False)
            feedback = agent.env.step(action.cpu())
            if hasattr(module, "rewarded"):
                carry = module.rewarded(carry, feedback.reward)
            if bool(feedback.cut[0]):
                break
            obs = feedback.obs
    finally:
        for hook in hooks:
            hook.remove()
    for net, calls in found:
        if calls:
            return net, calls
    raise UserError(f"{agent.path} does not call its {type(nets[0]).__name__} to act, so there is nothing to draw.")


def _first_row(inputs: Any) -> Any:
    """Tensors with only their first batch row, in a tuple or a dict."""
    first: Callable[[Any], Any] = lambda x: x[:1] if isinstance(x, Tensor) else x  # noqa: E731
    return {k: first(x) for k, x in inputs.items()} if isinstance(inputs, dict) else tuple(first(x) for x in inputs)


def _filled(found: Maps, options: dict[str, Any]) -> Maps:
    """Without the empty slots at the front of a window, which no other slot sees; named by the time before now."""
    start, mask = options.get("start"), options.get("mask")
    count = len(found.tokens)
    if start is not None:
        count -= int(start[0].nonzero().max()) if start[0].any() else 0
    elif mask is not None:
        count = int(mask[0].sum())
    return _last(found, count, [f"t-{count - i}" for i in range(count)])


def _last(found: Maps, count: int, names: Sequence[str]) -> Maps:
    """Only the last `count` keys and as many queries."""
    keys = found.weights[0].shape[-1]
    return _only(found, range(keys - count, keys), names)


def _only(found: Maps, keys: Sequence[int], names: Sequence[str]) -> Maps:
    """Only these keys and the queries of the same tokens; knock-outs count them from 0."""
    steps, count = found.weights[0].shape[-2:]
    queries = [key - count + steps for key in keys if key >= count - steps]

    def cut(weights: Sequence[Tensor], output: Tensor) -> tuple[list[Tensor], Tensor]:
        rows = output[queries] if len(output) == steps else output
        return [layer[:, queries][:, :, list(keys)] for layer in weights], rows

    def again(knock_outs: Sequence[KnockOut]) -> tuple[list[Tensor], Tensor]:
        moved = [
            one._replace(
                query=None if one.query is None else queries[one.query], key=None if one.key is None else keys[one.key]
            )
            for one in knock_outs
        ]
        return cut(*found.again(moved))

    weights, output = cut(found.weights, found.output)
    return dataclasses.replace(found, tokens=tuple(names), weights=tuple(weights), output=output, again=again)
