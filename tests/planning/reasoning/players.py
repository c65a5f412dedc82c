"""Scripted policies: a player of Countdown, who continues what is written by random legal steps; tokens of bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from foresight.data.text import TokenBatch, pad
from foresight.envs.text import countdown

TASK = countdown.countdown(held_out=30)


def player(text: str, draw: random.Random) -> str:
    """The rest of an answer in the form of `traces="steps"`."""
    question, _, written = text.partition(":")
    left = [int(number) for number in question.partition("=")[0].split(",")]
    for a, _, b, result in countdown._STEP.findall(written):
        left.remove(int(a))
        left.remove(int(b))
        left.append(int(result))
    out = "" if written else countdown.ANSWER
    while len(left) > 1:
        step, state = draw.choice(countdown.children(tuple(sorted(left))))
        left = list(state)
        out += step + ("," if len(left) > 1 else "")
    return out


class Pieces:
    """A policy that answers everything with the same tokens, which are pieces of UTF-8; 0 ends an answer.

    As in `decoding.generate` a row keeps the whole token that completes a stop text. `strips`: as SentencePiece,
    decoding drops a leading space.
    """

    stop_ids = (0,)
    context = 1 << 20

    def __init__(self, answer: Sequence[bytes], forced: Sequence[bytes] = (), strips: bool = False) -> None:
        characters = [bytes([i]) for i in range(256)]
        self.pieces = [b"", *dict.fromkeys([*answer, *forced, *characters])]
        self.answer, self.strips = [*map(self.pieces.index, answer), 0], strips
        self.completer = self

    def encode(self, prompt, tools=None):
        """The bytes of a text."""
        return [self.pieces.index(bytes([i])) for i in prompt.encode()]

    def decode(self, tokens):
        """The text of tokens, with a replacement character for what is no whole one."""
        text = b"".join(self.pieces[token] for token in tokens).decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text

    def __call__(self, prompts, group=1, max_new_tokens=16, temperature=1.0, generator=None, *, stop=()):
        """What is left of the answer after the longest part of it at the end of a prompt, up to a stop text."""
        rows, stopped = [], []
        for prompt in prompts:
            whole = list(prompt)
            said = max(n for n in range(len(self.answer)) if whole[len(whole) - n :] == self.answer[:n])
            row, ended = [], False
            for token in self.answer[said:]:
                row.append(token)
                ended = token == 0 or any(text in self.decode(row) for text in stop)
                if ended or len(row) == max_new_tokens:
                    break
            rows += [row] * group
            stopped += [ended] * group
        completion, length = pad(rows)
        shape = (len(prompts), group)
        logprob = torch.zeros(*shape, completion.shape[1])
        stops = torch.tensor(stopped).view(shape)
        return TokenBatch(*pad(prompts), completion.view(*shape, -1), length.view(shape), logprob, stops, logprob)
