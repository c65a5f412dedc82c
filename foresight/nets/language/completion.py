"""The tokens of an answer that is written already: as the sampler would have sampled them, with the end token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresight.errors import UserError
from foresight.nets.language.model import LanguageModel
from foresight.nets.language.tokenizer import Message, apply_chat_template, check_ids, ids_of

Answer = str | Message  # a text, or a message of the assistant, which may call tools


def encode(
    policy: LanguageModel, prompt: str | Sequence[Message], completion: Answer, tools: Sequence[Any] | None = None
) -> tuple[list[int], list[int]]:
    """Ids of a prompt, exactly as the sampler gets it, and of a completion with its end token.

    The completion is a text or an assistant message, which may call tools. Raises UserError if the chat template
    renders the prompt differently when an answer follows, or leaves a tool call out, for a prompt of no tokens, and for
    a token without embedding.
    """
    reply: dict[str, Any] = {"role": "assistant", "content": completion}
    if not isinstance(completion, str):
        reply = completion
    tokenizer, head = policy.tokenizer, policy.encode(prompt, tools)
    if not head:
        raise UserError(
            "The prompt has no tokens: the model has neither a chat template nor a token that begins a text. Give at "
            "least one character."
        )
    if tokenizer.chat_template is None:
        before = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        if reply.get("tool_calls"):
            raise UserError("The model has no chat template, so it cannot call tools: choose a model with one.")
        text = before + reply["content"]
        whole = ids_of(tokenizer, text)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        answered = [*messages, reply]
        whole = list(apply_chat_template(tokenizer, answered, tools, return_dict=False))
        if whole[: len(head)] != head:
            before = apply_chat_template(tokenizer, messages, tools, add_generation_prompt=True, tokenize=False)
            text = apply_chat_template(tokenizer, answered, tools, tokenize=False)
            if not text.startswith(before):
                raise UserError(
                    "The chat template renders the prompt differently when an answer follows (it drops the generation "
                    "prompt or rewrites earlier turns), so training and sampling would see different prompts: use a "
                    "template that only appends."
                )
    if whole[: len(head)] != head:  # tokens merge across the boundary (spaces, newlines), as sampled ones cannot
        whole = head + _continuation(tokenizer, head, text[len(before) :])
    tail = check_ids(policy.module, tokenizer, whole[len(head) :])
    names = [call["function"]["name"] for call in reply.get("tool_calls", ())]
    if missing := [name for name in names if name not in tokenizer.decode(tail)]:
        raise UserError(
            f"The chat template of the model leaves out the call of '{missing[0]}': choose a model whose template "
            "renders tool_calls."
        )
    ends = [i for i, token in enumerate(tail) if token in policy.stop_ids]
    if ends:
        return head, tail[: ends[0] + 1]  # what a template adds after the end is never sampled
    return head, [*tail, *policy.stop_ids[:1]] if tokenizer.eos_token_id is None else [*tail, tokenizer.eos_token_id]


def _continuation(tokenizer: Any, head: list[int], text: str) -> list[int]:
    """Ids of a text that continues `head`: without the BOS token or space that some tokenizers put before a text."""

    def ids(words: str) -> list[int]:
        return ids_of(tokenizer, words, add_special_tokens=False)

    end, read = tokenizer.eos_token, str(tokenizer.decode(head)) + text
    after = [] if end is None else ids(end + text)[1:]
    candidates = [ids(text), after, ids(text.removeprefix(" "))]
    return next((one for one in candidates if tokenizer.decode(head + one) == read), candidates[0])
