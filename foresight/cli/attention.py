"""`foresight attention`: where a language model or the network of a run looks, and what happens without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from foresight.cli import fields, screen
from foresight.errors import UserError

if TYPE_CHECKING:
    from foresight.runtime.attention.maps import Maps


def attention(
    source: Annotated[str, tyro.conf.Positional] = "smollm2",
    text: str | None = None,
    steps: int = 20,
    seed: int = 0,
    images: bool = False,
    view: str = "mean",
    query: int = -1,
    without_first: bool = False,
    knock_out: tuple[str, ...] = (),
    each_head: bool = False,
    out: tuple[str, ...] = (),
    checkpoint: str = "latest",
    json: bool = False,
) -> int:
    """Draw the attention of a transformer: tokens across, layers up, links as weights.

    Args:
        source: a language model (smollm2, a Hugging Face folder or a hub id), or a run directory of any algorithm whose
            network attends: a decision or trajectory transformer, a vla (also one that ppo fine-tunes), a diffusion
            policy with --denoiser transformer, a memory (gtrxl, transformer), storm, --images vit or swin.
        text: the text that a language model reads.
        steps: environment steps that an agent acts before its attention is drawn.
        seed: seed of the environment; the number of the held-out image (classifier).
        images: draw the attention of the network over images instead of that over time.
        view: mean or max of the heads, the number of one head, rollout (through all layers), or received (by each
            token).
        query: the token whose links are highlighted, and whose output is measured; -1 is the last.
        without_first: leave out the first token, which gets most of the attention of many language models.
        knock_out: links to remove, one or more of LAYER, LAYER.HEAD, LAYER.HEAD:QUERY,KEY (all count from 0), to see
            the output change. They are removed together.
        each_head: also measure how the output changes without each head.
        out: the files to write: .png, .svg or .pdf, .html (a page that needs nothing else) or .json; default:
            attention.html.
        checkpoint: latest, best, or a step (of a run).
        json: print tokens, weights and effects as JSON.
    """
    from foresight.runtime.attention import draw

    if text is not None and images:
        raise UserError("--text is for language models and --images for runs that see images: leave one out.")
    fields.check_seed(seed)
    if text is not None:
        fields.leave_out(attention, {"steps": steps, "seed": seed}, "is for agents that act, and --text is read")
    for file in out:
        fields.check_file(file, suffixes=draw.SUFFIXES)
    maps = _read(source, text, steps, seed, images, checkpoint)
    chosen = maps.row(maps.output, query)  # raises, before anything is computed
    likeliest = maps.likeliest(chosen) if maps.probabilities else None
    effects = []
    if knock_out:
        removed = [maps.knock_out(one) for one in knock_out]
        effects = [(" ".join(knock_out), maps.effect(removed, query))]
    heads = maps.each_head(query) if each_head else None
    files = out or (() if json else ("attention.png",) if maps.image is not None else ("attention.html",))
    for file in files:
        draw.save(maps, file, view, query, without_first, effects, heads)
    if json:
        more = {"knock_outs": [{"links": name, **effect} for name, effect in effects], "each_head": heads}
        screen.emit({**maps.document(view, without_first), **more, "out": list(files)})
        return 0
    _print(maps, effects, heads, likeliest)
    for file in files:
        screen.stdout().print(f"Written to {file}", markup=False, soft_wrap=True)
    return 0


def _read(source: str, text: str | None, steps: int, seed: int, images: bool, checkpoint: str) -> Maps:
    from foresight.nets.language.model import LanguageModel
    from foresight.runtime import run as runner
    from foresight.runtime.attention import sources

    if not (runner.find(source) / "config.yaml").is_file():
        from foresight.nets.language import pretrained

        if text is None:
            raise UserError(f"'{source}' is no run, so it is read as a language model: add --text \"…\".")
        return sources.of_text(pretrained.load(source, precision="float32", eager=True), text, f"{source}: {text}")
    agent = runner.load(Path(source), checkpoint)
    try:
        policy = getattr(agent.state, "policy", None)
        if not isinstance(policy, LanguageModel):
            if text is not None:
                raise UserError(f"{source} is no run of a language model: leave out --text.")
            return sources.of_run(agent, steps, seed, images)
        if text is None:
            raise UserError(f'{source} is a run of a language model: add --text "…".')
        return sources.of_text(policy, text, f"{source}: {text}")
    finally:
        agent.close()


def _print(
    maps: Maps,
    effects: list[tuple[str, dict[str, Any]]],
    heads: list[list[float]] | None,
    likeliest: list[tuple[str, float]] | None,
) -> None:
    console = screen.stdout()
    console.print(f"{len(maps.tokens)} tokens, {len(maps.weights)} layers of {maps.heads} heads", markup=False)
    if likeliest is not None:
        console.print(f"likeliest: {_likely(likeliest)}", markup=False, soft_wrap=True)
    for links, effect in effects:
        unit = " nats (KL)" if maps.probabilities else " of its norm"
        console.print(f"without {links} the output changes by {effect['change']:.4f}{unit}", markup=False)
        if "after" in effect:
            console.print(f"  then likeliest: {_likely(effect['after'])}", markup=False, soft_wrap=True)
        if "loss_after" in effect:
            console.print(f"  loss {effect['loss_before']:.3f} -> {effect['loss_after']:.3f} nats", markup=False)
    if heads is not None:
        ranked = sorted(((x, f"{i}.{h}") for i, row in enumerate(heads) for h, x in enumerate(row)), reverse=True)
        best = ", ".join(f"{name} ({x:.3f})" for x, name in ranked[:5])
        console.print(f"heads whose loss changes the output most: {best}", markup=False, soft_wrap=True)


def _likely(pairs: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name!r} {p:.3f}" for name, p in pairs)
