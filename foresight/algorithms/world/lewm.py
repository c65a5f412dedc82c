"""LeWorldModel: a joint-embedding world model trained end to end from pixels, Maes et al. 2026 (arXiv:2603.19312).

    model     minimize  ‖ẑ_{t+1} - z_{t+1}‖² + λ SIGReg(z),    z_t = enc(o_t),  ẑ_{t+1} = pred(z_{≤t}, a_{≤t})
    planning  a_{0:H} = argmin ‖ẑ_H - enc(o_goal)‖²,  ẑ_0 = enc(o_0), by the cross-entropy method

where a_t is a block of actions between two images that the model reads. The prediction alone would be minimized by one
constant embedding; SIGReg (LeJEPA, arXiv:2511.08544) keeps the embeddings of every time step normally distributed over
the batch. The gradient reaches both sides of the prediction. There is no reward, decoder, target network or policy: the
model is trained offline on the images and actions of random behavior, and a goal is an image.

What is kept: the two losses and their one coefficient, projectors with batch normalization, AdaLN-zero conditioning,
AdamW with warmup and a cosine schedule, CEM with the cost of the last step only, all blocks executed before replanning.

Differences: a small convolutional encoder for 32 × 32 pixels instead of a vision transformer for 224 × 224; no dropout;
float32 (bfloat16 is known to diverge); actions are scaled to [-1, 1] by the bounds of the space, not by their standard
deviation; planning starts from one image, whatever the history; the mean of the elites is not a candidate; a plan may
hold its actions for several steps, as random behavior does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.nn import functional

from foresight import errors
from foresight.data import trees
from foresight.data.trajectory import Tree, tree_map
from foresight.envs.base import Env, Spaces, require_num_envs
from foresight.errors import UserError
from foresight.nets import encoders
from foresight.nets.models.lewm import LeWM
from foresight.ops import latent, schedules
from foresight.planning.continuous import cem
from foresight.training import optim

KIND = "control"
UNIT = "updates"
METRICS = ("prediction", "sigreg", "effective_rank")
REPORT = 50  # updates between two yields


@dataclass(frozen=True)
class Config:
    """Defaults: small networks for 32 × 32 pixels; see the comments for the paper's values."""

    steps: int = 3_000  # gradient steps
    seed: int = 0
    num_envs: int = 16  # parallel environments, which collect the data
    data_steps: int = 32_768  # env steps of random behavior, summed over all environments, before the first update
    hold: float = 10.0  # mean number of env steps for which a random action is repeated
    block: int = 5  # env steps per block of actions; the paper's frame skip
    history: int = 1  # embeddings that a prediction reads; the paper: 3, and 1 on its TwoRoom
    batch_size: int = 128  # sequences of history + 1 images; the paper's
    learning_rate: float = 1e-3  # AdamW, the largest; 5e-5 in the paper, whose networks are 30 to 40 times as large
    lr_warmup: int = 100  # gradient steps
    weight_decay: float = 1e-3  # the paper's
    max_grad_norm: float = 1.0  # the paper's
    sigreg_coef: float = 0.1  # λ; the paper's
    slices: int = 256  # random directions of SIGReg; 1,024 in the paper, which found that they barely matter
    dim: int = 32  # of an embedding D; 192 in the paper
    depth: int = 16  # channels of the first convolution
    width: int = 64  # of the predictor; 192 in the paper
    layers: int = 2  # of the predictor; 6 in the paper
    heads: int = 4  # of the predictor; 16 in the paper
    hidden: int = 256  # of both projectors; 2,048 in the paper
    horizon: int = 5  # blocks of a plan; the paper's
    executed: int = 5  # blocks of a plan that are executed before the next one is made; the paper's
    candidates: int = 300  # of CEM; the paper's
    elites: int = 30  # of CEM; the paper's
    iterations: int = 10  # of CEM; the paper's, 30 on its PushT
    plan_std: float = 1.0  # of the first candidates; the paper's
    plan_hold: int = 1  # env steps for which an action of a plan is held, a divisor of `block`; the paper: 1
    threads: int = 1  # of torch, on a CPU; 0: one per core


@dataclass
class State:
    """Everything that is saved. The data are not: they follow from the seed."""

    config: Config
    model: LeWM
    optimizer: torch.optim.AdamW
    generator: torch.Generator  # samples slices and candidates
    sampler: torch.Generator  # samples sequences, on the CPU
    step: int = 0


class Data(NamedTuple):
    """Images `[N, T, ...]` and actions `[N, T, A]` in [-1, 1] of N environments.

    `start` `[K, 2]` are the environments and steps at which sequences within one episode begin.
    """

    image: Tensor
    action: Tensor
    start: Tensor


def build(config: Config, spaces: Spaces, device: str | torch.device = "cpu") -> State:
    """Networks and optimizer. Raises UserError for spaces and settings that are not supported."""
    image, action = _check(config, spaces)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LeWM(
            image, action, config.block, config.dim, config.history, config.depth, config.width,
            config.layers, config.heads, config.hidden,
        ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    generator = torch.Generator(device).manual_seed(config.seed)
    return State(config, model, optimizer, generator, torch.Generator().manual_seed(config.seed))


@torch.no_grad()
def act(state: State, obs: Tree, carry: Tree = None, explore: bool = False) -> tuple[Tensor, dict[str, Tensor], Tree]:
    """The next action of the plan for every row of `obs`, which is made again when all its actions were executed.

    `explore` changes nothing. The carry is the plan's actions `[B, executed · block, A]` and how many are left `[B]`.
    """
    config, model = state.config, state.model
    batch, device = len(obs["image"]), state.generator.device
    length = config.executed * config.block
    if carry is None:
        left = torch.zeros(batch, dtype=torch.int64, device=device)
        carry = {"plan": torch.zeros(batch, length, model.actions, device=device), "left": left}
    actions, left = carry["plan"], carry["left"]
    if len(rows := (left == 0).nonzero().squeeze(-1)):
        made = plan(state, tree_map(lambda x: x[rows], obs))
        actions = actions.index_copy(0, rows, made[:, :length])
        left = left.index_fill(0, rows, length)
    action = actions[torch.arange(batch, device=device), length - left]
    return model.to_env(action), {}, {"plan": actions, "left": left - 1}


def plan(state: State, obs: Tree) -> Tensor:
    """The actions `[B, horizon · block, A]` whose predicted last embedding is nearest that of the goal."""
    config, model = state.config, state.model.eval()
    z, goal = model.encoder(obs["image"]), model.encoder(obs["goal"])

    def score(blocks: Tensor) -> Tensor:
        batch, count, *_ = blocks.shape
        last = model.imagine(z.repeat_interleave(count, 0), held(blocks.flatten(0, 1), model.actions, config.plan_hold))
        return -(last.view(batch, count, -1) - goal.unsqueeze(1)).square().sum(-1)

    width = config.block // config.plan_hold * model.actions
    first = cem.initial(len(z), config.horizon, width, config.plan_std, z.device)
    found = cem.cem(score, first, config.candidates, config.elites, config.iterations, state.generator)
    return held(found.mean, model.actions, config.plan_hold).view(len(z), -1, model.actions)


def held(blocks: Tensor, actions: int, steps: int) -> Tensor:
    """`[..., K · actions]` with each of the K actions repeated for `steps`: `[..., K · steps · actions]`."""
    return blocks.unflatten(-1, (-1, actions)).repeat_interleave(steps, -2).flatten(-2)


def reset_carry(carry: Tree, cut: Tensor) -> Tree:
    """The carry without a plan where an episode was cut."""
    return trees.reset_carry(carry, cut)


@torch.no_grad()
def gather(config: Config, env: Env, model: LeWM) -> Data:
    """`data_steps` of random behavior, the same for the same seed: uniform actions, each held for a while."""
    generator = torch.Generator().manual_seed(config.seed)
    count = env.num_envs
    obs = env.reset(config.seed)
    action = torch.zeros(count, model.actions)
    images, actions, cuts = [], [], []
    for t in range(config.data_steps // count):
        fresh = torch.rand(count, 1, generator=generator) * config.hold < 1
        drawn = 2 * torch.rand(action.shape, generator=generator) - 1
        action = torch.where(fresh | (t == 0), drawn, action)
        feedback = env.step(model.to_env(action.to(model.center.device)).cpu())
        images.append(obs["image"])
        actions.append(action)
        cuts.append(feedback.cut)
        obs = feedback.obs
    span = config.history * config.block
    ended = torch.stack(cuts, 1).cumsum(1)
    start = (ended[:, span - 1 : -1] == functional.pad(ended[:, : -span - 1], (1, 0))).nonzero()
    if not len(start):
        raise UserError(
            f"No episode has {span} steps after its first, so there are no sequences of history {config.history} and "
            f"block {config.block}. Make one of them smaller."
        )
    return Data(torch.stack(images, 1), torch.stack(actions, 1), start)


def sample(state: State, data: Data) -> tuple[Tensor, Tensor]:
    """Sequences of `history` + 1 images `[B, T + 1, ...]`, and of the blocks of actions between them `[B, T, A]`."""
    config, device = state.config, state.generator.device
    chosen = torch.randint(0, len(data.start), (config.batch_size,), generator=state.sampler)
    env, first = data.start[chosen].unsqueeze(-1).unbind(1)
    step = first + torch.arange(config.history * config.block)
    image = data.image[env, first + config.block * torch.arange(config.history + 1)]
    return image.to(device), data.action[env, step].unflatten(1, (config.history, -1)).flatten(2).to(device)


def update(state: State, image: Tensor, action: Tensor) -> dict[str, float]:
    """One gradient step of encoder and predictor on images `[B, T + 1, ...]` and blocks of actions `[B, T, A]`."""
    config, model = state.config, state.model.train()
    rate = schedules.cosine(state.step / config.steps, config.learning_rate)
    for group in state.optimizer.param_groups:
        group["lr"] = rate * schedules.warmup(state.step, config.lr_warmup)
    z, predicted = model(image, action)
    terms = {
        "prediction": (predicted - z[:, 1:]).square().mean(),
        "sigreg": latent.sigreg(z.transpose(0, 1), config.slices, state.generator).mean(),
    }
    loss = optim.total(terms, {"sigreg": config.sigreg_coef})
    optim.descend(state.optimizer, loss.backward, config.max_grad_norm)
    state.step += 1
    rank = latent.effective_rank(z.detach().flatten(0, 1))
    return {name: value.item() for name, value in {**terms, "effective_rank": rank}.items()}


def train(
    config: Config, env: Env, state: State | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float], State]]:
    """Gather the data, then update until `steps`. A given state resumes with the same data."""
    require_num_envs(env, config.num_envs)
    if state is None:
        state = build(config, env.spaces, device)
    data = gather(config, env, state.model)
    while state.step < config.steps:
        metrics = update(state, *sample(state, data))
        if state.step % REPORT == 0 or state.step >= config.steps:
            yield state.step, metrics, state


def _check(config: Config, spaces: Spaces) -> tuple[gs.Space[Any], gs.Box]:
    """The spaces of images and of actions."""
    parts = spaces.obs.spaces if isinstance(spaces.obs, gs.Dict) else {}
    if "goal" not in parts or parts.get("image") != parts["goal"]:
        raise UserError(
            "lewm plans to goals given as images: it needs observations with an 'image' and a 'goal' of equal shape, "
            f"not {spaces.obs}. Use such an environment, for example --env TwoRoom-v0."
        )
    box = spaces.action
    if not isinstance(box, gs.Box) or len(box.shape) != 1 or not np.isfinite([box.low, box.high]).all():
        raise UserError(f"lewm plans continuous actions: it needs a bounded Box with one dim, not {box}.")
    encoders.require_choice(box)
    errors.at_least(
        1, config, "num_envs", "hold", "block", "history", "slices", "dim", "depth", "width", "layers", "heads",
        "hidden", "horizon", "candidates", "elites", "iterations", "plan_hold",
    )  # fmt: skip
    errors.at_least(2, config, "batch_size")
    errors.between(1, config.candidates, config, "elites")
    errors.between(1, config.horizon, config, "executed")
    if config.block % config.plan_hold:
        raise UserError(f"plan_hold is {config.plan_hold}, which does not divide a block of {config.block} env steps.")
    least = (config.history * config.block + 1) * config.num_envs
    errors.at_least(least, config, "data_steps")
    return parts["image"], box
