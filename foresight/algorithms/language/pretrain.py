"""Pretraining: a small decoder (`nets.language.decoder`) is trained from scratch to predict text by character.

The objective is GPT's (Radford et al. 2018) and, with more than one head, that of multi-token prediction (Gloeckle et
al. 2024, arXiv:2404.19737, eq. 2), whose heads train the trunk to look ahead:

    L = − mean_n log p¹(x_{n+1} | x_≤n) − c Σ_{k=2..K} mean_n log pᵏ(x_{n+1} | x_≤n) + α mean_l balance_l

Head k predicts from the trunk's features k - 1 characters earlier and from the characters since then: the chain of
DeepSeek-V3 (arXiv:2412.19437, §2.2; `nets.language.mtp`), not Gloeckle's parallel heads, so that its drafts are
consistent (`planning.generation.speculative`). All heads share the unembedding, and their gradients reach the trunk.

A text is a prompt and its answer (or completion), one padded row per text: there is no attention across texts. Of a
task with tools, the texts are scripted episodes, rendered by a chat template that only ends the model's turns. With
experts, their load is balanced by Switch's loss (α), the loss-free rule, or both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foresight import errors
from foresight.data.text import length_mask, pad
from foresight.envs.text import curriculum, graders
from foresight.envs.text.task import Example, TextTask
from foresight.envs.tools.make import played
from foresight.errors import UserError, unknown
from foresight.nets import precision
from foresight.nets.language import mtp, pretrained
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.moe import Routing
from foresight.nets.language.mtp import MultiTokenHeads
from foresight.nets.language.tokenizer import apply_chat_template, ids_of
from foresight.nets.language.tokentree import ROOT
from foresight.ops import schedules
from foresight.ops.tokens import token_logprob
from foresight.planning.generation import multi_turn
from foresight.planning.generation.rollout import answer, complete, texts
from foresight.training import language
from foresight.training.corpus import all_good, of_form
from foresight.training.microbatch import step
from foresight.training.options import Tuning

FORMS = ("prompt", "demonstration", "labeled")  # forms of data
KIND = "text"
UNIT = "updates"
METRICS = ("loss", "head_loss", "balance", "grad_norm")
EVALUATION_ENVS = 64  # texts evaluated at once


@dataclass(frozen=True)
class Config:
    """Architecture and hyperparameters of a small decoder, trained in minutes on the texts of a grammar."""

    steps: int = 1000
    """Total updates."""
    seed: int = 0
    """Seeds the initial weights and the order of the texts."""
    batch_size: int = 64
    """Texts per update."""
    layers: int = 4
    """Transformer layers, each of attention and a feed-forward layer."""
    dim: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 2
    """Key-value heads, each shared by a group of heads; equal to heads: plain attention."""
    mlp_size: int = 344
    """Hidden width of the feed-forward layer or, with experts, of each expert (SwiGLU: 8/3 of dim, a multiple of 8);
    0: attention only."""
    experts: int = 0
    """Experts per feed-forward layer; 0: a dense layer."""
    experts_per_token: int = 2
    """Experts per character (Switch: 1; Mixtral: 2)."""
    balance_coef: float = 0.01
    """α of the balance loss (Switch: 0.01)."""
    bias_rate: float = 0.0
    """Step size of the loss-free rule (Wang et al.: 0.001, without a balance loss)."""
    predict_tokens: int = 1
    """K: prediction heads, including the decoder's own (Gloeckle et al.: 4)."""
    predict_coef: float = 1.0
    """c: weight of the heads after the first (Gloeckle et al.: 1; DeepSeek-V3: 0.3 over their number)."""
    conversations: bool = False
    """Whether the decoder gets a chat template, which tasks with tools need."""
    tokens: str = "characters"
    """"characters", or "numbers": numbers below 100 are one token each."""
    init_std: float = 0.02
    """Standard deviation of the initial weights (GPT-2); 1/√dim is better for narrow models."""
    rope_base: float = 10_000.0
    """Base of the rotary positions (RoFormer); a small one tells neighboring positions apart from the start."""
    context: int = 128
    """Context length in characters, prompt and answer together; longer texts are cut."""
    max_new_tokens: int = 64
    """Maximum characters per answer, in evaluation."""
    learning_rate: float = 3e-3
    """AdamW (GPT-3 125M: 6e-4; smaller models tolerate more)."""
    lr_warmup: int = 50
    """Updates over which the learning rate rises linearly."""
    anneal_lr: bool = True
    """Whether the learning rate then falls linearly to 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay of AdamW (GPT-3)."""
    max_grad_norm: float = 1.0
    """Bound of the gradient norm (GPT-3)."""
    precision: str = "auto"
    """Precision of matrix products, over float32 weights: "auto", "float32" or "bfloat16"."""


@dataclass
class State:
    """Everything that changes during pretraining."""

    config: Config
    policy: LanguageModel
    heads: MultiTokenHeads | None
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0


def build(config: Config, spaces: None = None, device: torch.device | str = "cpu") -> State:
    """Initialize the decoder and its heads, and make the optimizer."""
    if config.predict_tokens < 1:
        raise UserError(f"predict_tokens must be at least 1 (the decoder's own head), not {config.predict_tokens}.")
    errors.at_least(1, config, "dim", "heads", "kv_heads")
    errors.at_least(2, config, "context")  # a token and the next one
    if config.experts and not config.mlp_size:
        raise UserError("experts are feed-forward layers, and mlp_size 0 leaves these out: give --mlp-size too.")
    if config.bias_rate and not config.experts:
        raise UserError("bias_rate balances experts, and there are none: give --experts too, or no --bias-rate.")
    from foresight.nets.language import decoder  # imported here: only a run needs transformers

    tokenizers = {"characters": decoder.characters, "numbers": decoder.numbers}
    if config.tokens not in tokenizers:
        raise unknown("kind of tokens", config.tokens, tokenizers)
    tokenizer = tokenizers[config.tokens]()
    if config.conversations:
        tokenizer.chat_template = decoder.TURNS
    shape = decoder.DecoderConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.mlp_size,
        max_position_embeddings=config.context,
        initializer_range=config.init_std,
        rope_base=config.rope_base,
        experts=config.experts,
        experts_per_token=config.experts_per_token,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = decoder.Decoder(shape).to(device)
        policy = LanguageModel(module, tokenizer, precision.dtype(config.precision, device))
        heads = mtp.heads_for(policy, config.predict_tokens) if config.predict_tokens > 1 else None
    trained = nn.ModuleList([policy] if heads is None else [policy, heads])
    optimizer = language.adamw(trained, config.learning_rate, Tuning(weight_decay=config.weight_decay))
    return State(config, policy, heads, optimizer, torch.Generator().manual_seed(config.seed))


act = answer


def documents(state: State, examples: Sequence[Example]) -> list[list[int]]:
    """The texts of examples as tokens, each between two end tokens, cut to the context.

    Raises UserError for a character that the decoder does not have, and for a row of messages without `conversations`.
    """
    tokenizer = state.policy.tokenizer
    vocabulary, rows = tokenizer.get_vocab(), []
    for example in examples:
        text, row = _row(tokenizer, example)
        if unknown := sorted(set(text) - vocabulary.keys()):
            raise UserError(f"The decoder has no character {unknown[0]!r}: use printable ASCII only.")
        rows.append(row[: state.config.context])
    return rows


def _row(tokenizer: Any, example: Example) -> tuple[str, list[int]]:
    """The characters of an example and its tokens: what the model is asked in evaluation, and the answer."""
    completion = example.columns.get("completion")  # may be null
    ending = str(example.answer or "" if completion is None else completion)
    if isinstance(example.prompt, str):
        asked = example.prompt
    elif tokenizer.chat_template is not None:
        messages = example.columns.get("messages")
        if messages is None or messages[:-1] != example.prompt:  # a task may have changed the prompt
            messages = [*example.prompt, {"role": "assistant", "content": ending}]
        row = list(apply_chat_template(tokenizer, messages, return_dict=False))
        return "".join(message["content"] for message in messages), row
    elif example.columns.get("messages") is not None:
        raise UserError(f"{example.place or 'An example'} has 'messages', a whole conversation: give --conversations.")
    else:
        asked = "\n".join(message["content"] for message in example.prompt)  # as `LanguageModel.encode`
    # Each by itself: digits of both would be one token, which is never asked and never sampled.
    answer = ids_of(tokenizer, ending, add_special_tokens=False)
    return asked + ending, [*ids_of(tokenizer, asked), *answer, tokenizer.eos_token_id]


def written(state: State, env: TextTask, examples: Sequence[Example]) -> Sequence[Example]:
    """The examples to train on: of a task with tools, the conversations of its scripted episodes.

    Raises UserError for such a task without `conversations`, and for rows whose answers are not all to be learned.
    """
    if env.episode is None:
        return all_good(of_form(examples, FORMS, "pretrain", env.name), "pretrain")
    if state.policy.tokenizer.chat_template is None:
        raise UserError(f"'{env.name}' is a task of conversations: give --conversations.")
    found = [messages for example in examples for messages in played(env, example)]
    return [Example(messages[:-1], messages[-1]["content"], {"messages": messages}) for messages in found]


def loss(state: State, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, dict[str, Tensor], list[Routing]]:
    """The objective over texts `[B, T + 1]` of the given lengths `[B]`, its terms, and the routing of the tokens."""
    config, policy = state.config, state.policy
    inputs, real = tokens[:, :-1], length_mask(lengths - 1, tokens.shape[1] - 1).to(tokens.device)
    target, trunk = tokens[:, 1:][real], policy.module.model
    embedded = trunk.embed_tokens(inputs)
    hidden, routing = trunk(inputs_embeds=embedded)
    terms = {"next": -token_logprob(policy.logits(hidden[real]), target)[0].mean()}
    total = terms["next"]
    if state.heads is not None:
        parents = torch.arange(inputs.numel(), device=inputs.device).view_as(inputs) - 1
        parents[:, 0] = ROOT
        features, exist = state.heads(hidden.flatten(0, 1), embedded.flatten(0, 1), parents.flatten())
        ahead = []
        for head in range(1, len(state.heads)):
            there = exist[head] & real.flatten()
            logits = policy.logits(features[head, there])
            ahead.append(-token_logprob(logits, tokens[:, 1:].flatten()[there])[0].mean())
        terms["head"] = torch.stack(ahead).sum()
        total = total + config.predict_coef * terms["head"]
    routed = [Routing(r.affinity[real.flatten()], r.chosen[real.flatten()]) for r in routing]
    if routed:
        terms["balance"] = torch.stack([r.balance for r in routed]).mean()
        total = total + config.balance_coef * terms["balance"]
    return total, terms, routed


def buckets(lengths: Tensor, parts: int = 4, full: float = 0.75) -> list[Tensor]:
    """The rows of a batch, in `parts` micro-batches of similar lengths; in one if padding leaves it `full` enough."""
    if lengths.float().mean() >= full * lengths.max() or len(lengths) < parts:
        return [torch.arange(len(lengths))]
    return list(lengths.argsort(stable=True).tensor_split(parts))


def update(state: State, tokens: Tensor, lengths: Tensor) -> dict[str, float]:
    """One gradient step on texts `[B, T + 1]` of lengths `[B]`, and one of the loss-free rule if it is on.

    Texts of similar lengths are computed together (`buckets`), which does not change the gradient.
    """
    config, routed = state.config, list[Routing]()

    def objective(part: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        few = lengths[part]
        share = float((few - 1).sum() / (lengths - 1).sum())
        total, terms, routing = loss(state, tokens[part, : int(few.max())].to(state.policy.device), few)
        routed.extend(routing)
        return share * total, {name: share * term for name, term in terms.items()}

    whole = config.experts or state.heads is not None  # their terms are no means over tokens
    parts = [torch.arange(len(lengths))] if whole else buckets(lengths)
    losses = [functools.partial(objective, part) for part in parts]
    rate = schedules.warmup_linear(config.learning_rate, state.step, config.steps, config.lr_warmup, config.anneal_lr)
    with state.policy.precision():
        metrics = step(state.optimizer, losses, rate, config.max_grad_norm)
    if math.isfinite(metrics["loss"]) and config.bias_rate:
        for layer, routing in zip(state.policy.module.model.layers, routed, strict=True):
            layer.feed.rebalance(routing.load, config.bias_rate)
    if routed:
        metrics["busiest"] = max(config.experts * r.load.max().item() for r in routed)
    metrics["tokens"] = float((lengths - 1).sum())
    names = {"loss": "objective", "next": "loss", "head": "head_loss"}
    return {names.get(key, key): value for key, value in metrics.items()}


@torch.no_grad()
def measure(state: State, env: TextTask) -> tuple[str, float, dict[str, float]]:
    """Nats per character (or token, see `tokens`) of the held-out texts, end tokens included.

    Also bits, and the grade of greedy answers.
    """
    rows, total, count = documents(state, written(state, env, env.test)), 0.0, 0
    for start in range(0, len(rows), EVALUATION_ENVS):
        tokens, lengths = pad(rows[start : start + EVALUATION_ENVS])
        with state.policy.precision():
            _, terms, _ = loss(state, tokens.to(state.policy.device), lengths)
        characters = int((lengths - 1).sum())
        total, count = total + terms["next"].item() * characters, count + characters
    nats = total / count
    unit = "character" if state.config.tokens == "characters" else "token"
    more = {f"bits per {unit}": nats / math.log(2)}
    if env.episode is not None:
        tokens_of_turn = state.config.max_new_tokens
        graded = multi_turn.converse(state.policy, env, env.test, 1, tokens_of_turn, 0.0).parts["outcome"]
    else:
        graded = [] if env.grader is None else env.grade(env.test, act(state, env.test)[0])
    if scores := graders.scored(graded):
        more[env.metric] = sum(scores) / len(scores)
    return f"nats per {unit}", nats, more


def picture(state: State, env: TextTask) -> str:
    """Texts sampled without a prompt, and greedy answers to held-out prompts."""
    sampled = complete(state.policy, [""], 4, state.config.context - 1, generator=torch.Generator().manual_seed(0))
    prompts = list(env.test)[:4]
    endings = act(state, prompts)[0]
    answers = [f"{e.question}|{ending}" for e, ending in zip(prompts, endings, strict=True)]
    return "\n".join([*texts(state.policy, sampled), "", *answers])


def export(state: State, directory: str | Path, merged: bool = True) -> Path:
    """Write the decoder and its heads as a Hugging Face folder: every language algorithm can start from it."""
    return pretrained.save_folder(state.policy.module, state.policy.tokenizer, directory, merged, state.heads)


def train(
    config: Config, env: TextTask, state: State | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, dict[str, Any], State]]:
    """Sample texts and train on them; yields after every update. Raises UserError for a task with a curriculum."""
    curriculum.refuse(env, "pretrain")
    state = build(config, env.spaces, device) if state is None else state
    rows = documents(state, written(state, env, env.train))
    while state.step < config.steps:
        drawn = torch.randint(len(rows), (config.batch_size,), generator=state.generator).tolist()
        metrics = update(state, *pad([rows[i] for i in drawn]))
        state.step += 1
        yield state.step, metrics, state
