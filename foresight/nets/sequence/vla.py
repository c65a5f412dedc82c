"""A vision-language-action policy: image tokens and the words of an instruction, then action tokens.

Source: RT-1, Brohan et al. 2022 (arXiv:2212.06817): convolutions that the instruction modulates (FiLM, Perez et al.
2017, arXiv:1709.07871), TokenLearner (Ryoo et al. 2021, arXiv:2106.11297), and a transformer in which no action token
attends to an action token. Missing cameras are masked as in Octo (arXiv:2405.12213).

With head "point" an action begins with a point of the first picture. Its token attends once more, to all cells of the
picture, and the attention itself is the distribution over cells, as in pointer networks (Vinyals et al. 2015,
arXiv:1506.03134). The other tokens are given what is seen there. If an action begins with several points, the words
alone point at all but the last, and what is seen there is one more token for the transformer: first where the named
object is, then the action, as in embodied chain of thought (Zawalski et al. 2024, arXiv:2407.08693).

With `find` the words find what they name in the first picture, with any head, and where it is is one more token. The
words do not modulate the convolutions then: with both, a policy learns the shorter way, which knows only pairs of the
data.

A network of several embodiments (RT-X, arXiv:2310.08864) reads observations and actions that are padded to shared ones,
see `data.embodiments`. Everything is shared but what their data say of each: scales and ranges, and the token that
begins an action. Padding is masked: its tokens are not seen, and have one choice, so no loss and no gradient.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gymnasium import spaces as gs
from torch import Tensor, nn

from foresight import errors
from foresight.data.embodiments import CAMERA_MASK, EMBODIMENT, MISSION, Embodiment
from foresight.data.trajectory import Tree
from foresight.errors import UserError
from foresight.nets import conv, encoders
from foresight.nets.imitation import MeanStd
from foresight.nets.sequence import attention
from foresight.nets.sequence.action_tokens import ActionTokens, Flow, FlowField, SharedTokens, Tokens
from foresight.nets.sequence.grounding import Finder, Pointer
from foresight.nets.sequence.transformer import NO_CACHE, Block, TransformerConfig
from foresight.nets.sequence.vit import ViT

HEADS = ("bins", "flow", "point")
BLIND = ("language", "image")
IMAGES = ("convs", "vit")
PRIME, BASE = 1021, 263  # of the hash of a word, a polynomial of its bytes
FILES = ("policy.json", "policy.safetensors")
ADVICE = "Train one with: foresight train vla --preset BabyAI --out RUN, and give it with --policy RUN"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the network."""

    dim: int  # width of the transformer
    layers: int  # of the transformer
    heads: int  # of its attention
    channels: int  # of the convolutions
    patch: int  # side of the patches of the first convolution, in pixels
    film_layers: int  # convolutions that the instruction modulates
    image_tokens: int  # of each camera
    words: int  # the longest instruction
    edges: int  # of the bins of a continuous action
    head: str  # one of HEADS
    blind: str | None = None  # one of BLIND: its tokens are masked
    points: int = 1  # with which an action begins, of head "point"
    find: bool = False  # one more token: where in the first picture is what the words name
    images: str = "convs"  # one of IMAGES: what reads the patches


class Features(NamedTuple):
    """What the network computes: before the first action token, at the K action tokens, and of the first picture."""

    hidden: Tensor  # [..., dim]
    actions: Tensor  # [..., K, dim]
    cells: Tensor | None  # [..., cells, channels]
    first: Tensor | None  # [..., points - 1, cells]: logits of the points of the words
    which: Tensor | None = None  # [...] the embodiments, of a network of several


class Words(nn.Module):
    """Instructions as UTF-8 bytes `[N, L]`, padded with zeros, to word vectors `[N, W, dim]` and their mask `[N, W]`.

    The vectors are those of the words alone; `placed` adds where in the instruction they are.

    W is the number of words of the longest one, at most `words`.

    A word is a row of a table of 1,021, by a hash of its bytes; words that the data do not have share one row.
    """

    known: Tensor
    powers: Tensor

    def __init__(self, words: int, dim: int) -> None:
        super().__init__()
        self.words = words
        self.table = nn.Embedding(PRIME + 1, dim)  # the last row is for unknown words
        self.position = nn.Parameter(torch.zeros(words, dim))
        self.register_buffer("known", torch.zeros(PRIME, dtype=torch.bool))
        self.register_buffer("powers", torch.tensor([pow(BASE, i, PRIME) for i in range(64)]), persistent=False)

    def ids(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of the words `[N, W]` and where there are words. Raises UserError for too many."""
        letter = (text != 0) & (text != ord(" "))
        begins = letter & ~F.pad(letter[:, :-1], (1, 0))
        index = begins.long().cumsum(1) - 1  # of the word of each letter
        count = index[:, -1] + 1
        longest = int(count.max()) if len(count) else 0
        if longest > self.words:
            instruction = bytes(text[count.argmax()].tolist()).rstrip(b"\0").decode(errors="replace")
            raise UserError(
                f"The instruction '{instruction}' has {longest} words, but the context of the policy is {self.words}. "
                f"Shorten it, or train a policy with --words {longest}."
            )
        at = torch.arange(text.shape[1], device=text.device)
        within = at - torch.where(begins, at, 0).cummax(1).values
        terms = torch.where(letter, text.long() * self.powers[within.clamp(max=63)], 0)
        hashes = terms.new_zeros(len(text), max(longest, 1)).scatter_add_(1, index.clamp(min=0), terms) % PRIME
        return hashes, torch.arange(hashes.shape[1], device=text.device) < count[:, None]

    def fit(self, text: Tensor) -> None:
        """Know the words of the instructions `text` `[S, L]`."""
        hashes, real = self.ids(text.unique(dim=0))
        self.known[hashes[real]] = True

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors, zero where there is no word, and their mask (bool)."""
        hashes, real = self.ids(text)
        rows = torch.where(self.known[hashes], hashes, PRIME)
        if self.training:  # the row of unknown words is trained on words that are hidden
            rows = torch.where(torch.rand_like(rows, dtype=torch.float32) < 0.05, PRIME, rows)
        return self.table(rows) * real.unsqueeze(-1), real

    def placed(self, vectors: Tensor, real: Tensor) -> Tensor:
        """The vectors with their places."""
        return vectors + self.position[: vectors.shape[1]] * real.unsqueeze(-1)


class Eye(nn.Module):
    """Images `[N, C, H, W]` to `tokens` vectors `[N, tokens, dim]`, with the instruction's vector `[N, dim]`.

    The vectors are weighted means over the cells, which are returned too, row by row: `[N, cells, channels]`.
    A convolution or a Vision Transformer reads the patches, before the convolutions that the instruction modulates.
    """

    def __init__(self, shape: tuple[int, int, int], config: Shape) -> None:
        super().__init__()
        depth, height, width = shape
        if config.patch > min(height, width):
            raise UserError(f"patch must be at most {min(height, width)} pixels, not {config.patch}. Use --patch.")
        channels, self.vit = config.channels, None
        if config.images == "vit":
            whole = depth, height - height % config.patch, width - width % config.patch  # as a convolution reads them
            self.vit = ViT(whole, None, config.patch, channels, config.layers, config.heads)
        else:
            self.patches = nn.Conv2d(depth, channels, config.patch, config.patch)
            self.position = nn.Parameter(0.02 * torch.randn(channels, height // config.patch, width // config.patch))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(config.film_layers))
        self.films = nn.ModuleList(nn.Linear(config.dim, 2 * channels) for _ in range(config.film_layers))
        for film in self.films:  # at first the convolutions do not depend on the instruction
            nn.init.zeros_(film.weight)  # type: ignore[arg-type]
            nn.init.zeros_(film.bias)  # type: ignore[arg-type]
        self.maps = nn.Conv2d(channels, config.image_tokens, 1)
        self.out = nn.Linear(channels, config.dim)

    def forward(self, image: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors and the cells."""
        if self.vit is None:
            x = torch.relu(self.patches(image) + self.position)
        else:
            tokens = self.vit(image[..., : self.vit.shape[1], : self.vit.shape[2]], every=True)[:, 1:]
            x = tokens.transpose(1, 2).unflatten(2, (self.vit.rows, self.vit.columns))
        for filters, film in zip(self.convs, self.films, strict=True):
            scale, shift = film(words)[..., None, None].chunk(2, 1)
            x = x + torch.relu((1 + scale) * filters(x) + shift)
        weights, cells = self.maps(x).flatten(2).softmax(-1), x.flatten(2).transpose(1, 2)  # TokenLearner
        return self.out(weights @ cells), cells


class VLA(nn.Module):
    """Dict observations to the `Output` over actions; every image is a camera, `mission` is the instruction.

    Other arrays become one token, normalized over the data. `camera_mask` `[..., cameras]`, if observations have it, is
    0 where a camera is missing, and nothing then depends on its pixels. Observations and actions of several
    `embodiments` are their shared ones. Raises UserError for spaces that do not fit.
    """

    def __init__(
        self, obs: gs.Space[Any], action: gs.Space[Any], config: Shape, embodiments: Sequence[Embodiment] = ()
    ) -> None:
        super().__init__()
        if embodiments and config.head != "bins":
            raise UserError(f"head '{config.head}' is for one embodiment. Use --head bins.")
        for kind, name, valid in (
            ("head", config.head, HEADS), ("blind", config.blind, (None, *BLIND)), ("images", config.images, IMAGES)
        ):  # fmt: skip
            if name not in valid:
                raise errors.unknown(kind, str(name), [str(one) for one in valid])
        spaces = dict(obs.spaces) if isinstance(obs, gs.Dict) else {}
        self.cameras = [name for name, part in spaces.items() if encoders.is_image(part)]
        self.vectors = [name for name, part in spaces.items() if encoders.is_vector(part) and name != CAMERA_MASK]
        if MISSION not in spaces or not (self.cameras or self.vectors):
            raise UserError(
                f"A VLA needs dict observations with '{MISSION}' (bytes) and images or vectors, not {obs}. "
                "BabyAI has them with --env-options camera=6."
            )
        self.obs_space, self.action_space, self.config, self.embodiments = obs, action, config, tuple(embodiments)
        for wanted, name, advice in (
            (config.head == "point", "head 'point'", "Use --head bins"),
            (config.find, "find", "Use --no-find"),
        ):
            if wanted and not self.cameras:
                raise UserError(f"{name} needs an image in the observations, not {obs}. {advice}.")
        grid = None
        if config.head == "point":
            _, height, width = _planes(spaces[self.cameras[0]])
            grid = height // config.patch, width // config.patch
        self.actions = (
            SharedTokens([part.action for part in embodiments], config.edges)
            if embodiments
            else ActionTokens(action, config.edges, grid, config.points)
        )
        if config.head == "flow" and not self.actions.continuous:
            raise UserError(f"head 'flow' is for actions of a Box, not {action}. Use --head bins.")
        if config.head == "flow":
            for own in [part.action for part in embodiments] or [action]:
                encoders.require_choice(own)
        self.words = Words(config.words, config.dim)
        self.eyes = nn.ModuleDict({name: Eye(_planes(spaces[name]), config) for name in self.cameras})
        self.camera = nn.Parameter(0.02 * torch.randn(len(self.cameras), 1, config.dim))
        self.state = nn.ModuleDict({name: nn.Linear(spaces[name].shape[0], config.dim) for name in self.vectors})  # type: ignore[index]
        owners: list[Any] = [part.obs for part in embodiments] or [obs]
        self.scales = nn.ModuleDict(  # of the numbers that are an embodiment's own
            {_key(name, i): MeanStd(own[name].shape[0]) for i, own in enumerate(owners) for name in self.vectors
             if name in own.spaces}
        )  # fmt: skip
        places = 0 if config.head == "flow" else self.actions.count - max(self.actions.points - 1, 0)
        self.begin = nn.Parameter(0.02 * torch.randn(len(owners), config.dim))  # the token before the first action
        self.places = nn.Parameter(0.02 * torch.randn(places, config.dim))
        block = TransformerConfig(
            layers=config.layers, dim=config.dim, heads=config.heads, norm="layer", activation="gelu", bias=True
        )
        self.blocks = nn.ModuleList(Block(block) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.logits = nn.Linear(config.dim, self.actions.vocabulary)
        self.field = FlowField(self.actions.count, config.dim) if config.head == "flow" else None
        self.pointer = None if grid is None else Pointer(grid[0] * grid[1], config.channels, config.dim, config.points)
        self.finder = None
        if config.find:
            self.finder = Finder(_planes(spaces[self.cameras[0]]), config.patch, config.dim)
        for name, weight in self.blocks.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def fit(self, obs: Tree, action: Tensor) -> None:
        """Take the words, the scales of arrays and the ranges of actions from data `[S, ...]`."""
        self.words.fit(obs[MISSION])
        if not isinstance(self.actions, SharedTokens):
            self.actions.fit(action)
        for i in range(len(self.begin)):
            mine = obs[EMBODIMENT] == i if self.embodiments else slice(None)
            if isinstance(self.actions, SharedTokens):
                self.actions.fit(action[mine], i)
            for name in self.vectors:
                if (scale := self._scale(name, i)) is not None:
                    scale.fit(obs[name][mine][:, : len(scale.mean)])

    def features(self, obs: Tree) -> Features:
        """What the actions depend on."""
        x, seen, *picture = self._prefix(obs)
        lead = obs[MISSION].shape[:-1]
        places = len(self.places)
        x = torch.cat([x, self.places.expand(len(x), -1, -1)], 1)
        allowed = attention_mask(seen, places)
        for block in self.blocks[:-1]:
            x, *_ = block(x, None, allowed, NO_CACHE, 0)
        x = self.norm(self._last(x, allowed, 1 + places))
        hidden, actions = x[:, -1 - places].unflatten(0, lead), x[:, x.shape[1] - places :].unflatten(0, lead)
        cells, first = (part if part is None else part.unflatten(0, lead) for part in picture)
        return Features(hidden, actions, cells, first, obs[EMBODIMENT] if self.embodiments else None)

    def _last(self, x: Tensor, allowed: Tensor, count: int) -> Tensor:
        """The last block at the last `count` tokens `[N, count, dim]`: no other one is read after it."""
        if attention.is_recording():  # a picture has all rows
            y, *_ = self.blocks[-1](x, None, allowed, NO_CACHE, 0)
            return y[:, -count:]
        y, *_ = self.blocks[-1](x, None, allowed[:, :, -count:], NO_CACHE, 0, pick=lambda tokens: tokens[:, -count:])
        return y

    def output(self, features: Features) -> Tokens | Flow:
        """The distribution over actions."""
        hidden, actions, cells, first, which = features
        if which is not None and isinstance(self.actions, SharedTokens):
            return Tokens(self.logits(actions), self.actions.of(which))
        assert isinstance(self.actions, ActionTokens)
        if self.field is not None:
            return Flow(self.field, hidden, self.actions)
        if self.pointer is None or cells is None:
            return Tokens(self.logits(actions), self.actions)
        point, there = self.pointer(actions[..., 0, :], cells)
        others = self.logits(F.gelu(actions[..., 1:, :] + there.unsqueeze(-2)))
        points = point.unsqueeze(-2) if first is None else torch.cat([first, point.unsqueeze(-2)], -2)
        points = F.pad(points, (0, others.shape[-1] - points.shape[-1]))
        return Tokens(torch.cat([points, others], -2), self.actions)

    def forward(self, obs: Tree) -> Tokens | Flow:
        """The distribution over actions."""
        return self.output(self.features(obs))

    def tokens(self, obs: Tree) -> tuple[list[str], Tensor]:
        """The names of the tokens of observations `[1, ...]`, and which of them are seen, `[P + K]` bool."""
        names = [f"{name} {i}" for name in self.cameras for i in range(self.config.image_tokens)]
        if self.finder is not None:
            names.insert(self.config.image_tokens, "found")
        names += [f"point {i}" for i in range(self.actions.points - 1 if self.pointer is not None else 0)]
        mission = bytes(obs[MISSION].flatten().tolist()).decode(errors="replace").replace("\0", " ")
        words = [word for word in mission.split(" ") if word] or [""]
        names += [*self.vectors, *words, "begin", *(f"action {i}" for i in range(len(self.places)))]
        acts = self.begin.new_ones(len(self.places), dtype=torch.bool)
        if isinstance(self.actions, SharedTokens):
            acts[self.actions.lengths[int(obs[EMBODIMENT].flatten()[0])] :] = False
        return names, torch.cat([self._prefix(obs)[1][0], acts])

    def finder_loss(self, obs: Tree) -> Tensor:
        """`Finder.loss` of the instructions and the first pictures of `obs`, or 0 without a finder or if blind."""
        if self.finder is None or self.config.blind is not None:
            return self.begin.new_zeros(())
        image, there = self._view(obs, 0)
        if not there.any():
            return self.begin.new_zeros(())
        distinct, which = obs[MISSION].flatten(0, -2)[there].unique(dim=0, return_inverse=True)
        words, spoken = self.words(distinct)
        return self.finder.loss(image[there], words, spoken, which)

    def _view(self, obs: Tree, camera: int) -> tuple[Tensor, Tensor]:
        """The images `[N, C, H, W]` of a camera, and whether each is there `[N]`."""
        name, present = self.cameras[camera], obs.get(CAMERA_MASK)
        order = conv.order(self.obs_space[name].shape)  # type: ignore[index]
        image = obs[name].flatten(0, -4).permute(0, *(1 + j for j in order)).float() / 255  # type: ignore[union-attr]
        there = torch.ones(len(image), dtype=torch.bool, device=image.device)
        return image, there if present is None else present[..., camera].flatten() > 0

    def _prefix(self, obs: Tree) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The tokens before the actions `[N, P, dim]`, which are seen `[N, P]`, `Features.cells` and `.first`."""
        for name in (MISSION, *self.cameras, *self.vectors):
            if name not in obs:
                raise UserError(
                    f"The observation has no '{name}', which this policy was trained on. Give zeros, and for a camera "
                    f"'{CAMERA_MASK}' with a 0 for it. It has: {', '.join(obs)}."
                )
        if self.embodiments and EMBODIMENT not in obs:
            numbers = ", ".join(f"{i} for {part.name}" for i, part in enumerate(self.embodiments))
            raise UserError(f"The observation has no '{EMBODIMENT}'. It is a number: {numbers}.")
        blind = self.config.blind
        words, spoken = self.words(obs[MISSION].flatten(0, -2))
        spoken = spoken & (blind != "language")
        vectors = self.words.placed(words, spoken) * spoken.unsqueeze(-1)
        mean = vectors.sum(1) / spoken.sum(1, keepdim=True).clamp(min=1)
        modulating = mean if self.finder is None else torch.zeros_like(mean)
        tokens, seen, pictures = [], [], []
        for i, name in enumerate(self.cameras):
            image, there = self._view(obs, i)
            visible = (there & (blind != "image"))[:, None]
            vectors_of, cells = self.eyes[name](image, modulating)
            tokens.append(vectors_of + self.camera[i])
            seen.append(visible.expand(-1, self.config.image_tokens))
            pictures.append(cells * visible.unsqueeze(-1))
            if self.finder is not None and not i:
                tokens.append(self.finder(image, words, spoken)[1].unsqueeze(1))
                seen.append(visible & spoken.any(1, keepdim=True))
        first = []
        for i in range(self.actions.points - 1 if self.pointer is not None else 0):
            logits, there = self.pointer(mean, pictures[0], i)  # type: ignore[misc]
            first.append(logits)
            tokens.append(there.unsqueeze(1))
            seen.append(seen[0][:, :1])
        which = obs[EMBODIMENT].flatten() if self.embodiments else torch.zeros_like(spoken[:, 0], dtype=torch.int64)
        for name in self.vectors:
            values, there = self._scaled(name, obs[name].flatten(0, -2), which)
            tokens.append(self.state[name](values).unsqueeze(1))
            seen.append(there[:, None])
        begin = self.begin[which].unsqueeze(1) if self.embodiments else self.begin.expand(len(vectors), -1, -1)
        tokens += [vectors, begin]
        seen += [spoken, spoken.new_ones(len(spoken), 1)]
        points = torch.stack(first, 1) if first else None
        return torch.cat(tokens, 1), torch.cat(seen, 1), pictures[0] if pictures else None, points

    def _scale(self, name: str, which: int) -> MeanStd | None:
        """The scale of a vector of one embodiment, which may not have it."""
        return dict(self.scales.items()).get(_key(name, which))  # type: ignore[return-value]

    def _scaled(self, name: str, values: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors `[N, D]` by the scales of the embodiments `which` `[N]`, 0 past their own, and who has them `[N]`."""
        scaled, there = torch.zeros_like(values), torch.zeros_like(which, dtype=torch.bool)
        for i in range(len(self.begin)):
            if (scale := self._scale(name, i)) is not None:
                own, mine = scale.encode(values[:, : len(scale.mean)]).clamp(-10, 10), which == i
                scaled = torch.where(mine[:, None], F.pad(own, (0, scaled.shape[1] - own.shape[1])), scaled)
                there = there | mine
        return scaled, there


def attention_mask(seen: Tensor, places: int) -> Tensor:
    """Who attends to whom, `[N, 1, P + K, P + K]` bool: all to the `seen` `[N, P]` tokens, and each token to itself.

    No action token attends to another one, and nothing before the actions attends to them (RT-1).
    """
    columns = F.pad(seen, (0, places))[:, None, None]
    itself = torch.eye(columns.shape[-1], dtype=torch.bool, device=seen.device)
    return columns | itself


def save(vla: VLA, folder: Path) -> Path:
    """Write the sizes and the weights of `vla` to `folder`; `load` reads them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILES[0]).write_text(json.dumps(dataclasses.asdict(vla.config), indent=2) + "\n", encoding="utf-8")
    save_file({name: x.contiguous() for name, x in vla.state_dict().items()}, folder / FILES[1])
    return folder


def load(path: str | Path, obs: gs.Space[Any], action: gs.Space[Any], embodiments: Sequence[Embodiment] = ()) -> VLA:
    """The VLA of a run or of its folder `export`, for these spaces.

    Raises UserError if there is none, it is not complete or it differs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path).expanduser()
    folder = folder / "export" if (folder / "export").is_dir() else folder
    if not (folder / FILES[0]).is_file():
        raise UserError(f"There is no trained VLA in {path}. {ADVICE}")
    try:
        shape = Shape(**json.loads((folder / FILES[0]).read_text(encoding="utf-8")))
        weights = load_file(folder / FILES[1])
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"The VLA in {path} is not complete: copy or export it again.") from error
    vla = VLA(obs, action, shape, embodiments)
    try:
        vla.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"The VLA in {path} was trained on other observations or actions: {error}") from error
    return vla


def _key(name: str, which: int) -> str:
    """The name of the scale of a vector; of the first embodiment it is that of a network of one."""
    return f"{name}:{which}" if which else name


def _planes(space: gs.Space[Any]) -> tuple[int, int, int]:
    """(C, H, W) of images in any order of their dims. Raises UserError for stacks of images."""
    shape = space.shape or ()
    order = conv.order(shape)
    if order is None or len(shape) != 3:
        raise UserError(f"A camera of a VLA shows one image [height, width, 3] or [3, height, width], not {shape}.")
    channels, height, width = (shape[i] for i in order)
    return channels, height, width
