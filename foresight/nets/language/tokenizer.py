"""The tokenizer of a language model: chat templates, and checks that it fits the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from foresight.data.text import check_characters
from foresight.errors import UserError

Message = dict[str, Any]  # role, content and, of the assistant, perhaps tool_calls
LEAST_TOKENS = 0.9  # of the model's embedding rows: tables are padded to round sizes, but by no more
MOST_UNUSED = 8  # special tokens without an embedding: Gemma 3's tokenizer has one, for images, CodeLlama 34B's four


def ids_of(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The ids of a text, with `options` of the tokenizer. Raises UserError for half of a surrogate pair."""
    try:
        return list(tokenizer.encode(text, **options))
    except (TypeError, UnicodeEncodeError):
        check_characters(text, "The text")
        raise


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None, **options: Any
) -> Any:
    """The tokenizer's `apply_chat_template`, with `options`, of a conversation and the tools offered in it.

    Where the template rejects a system prompt (Gemma's, Mistral's first), the user's first message begins with it.
    Raises UserError if the template rejects the conversation or ignores the tools, and for half of a surrogate pair.
    """
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(list(messages), tools=list(tools) if tools else None, **options)
        if tools and rendered == tokenizer.apply_chat_template(list(messages), **options):
            raise UserError(
                "The chat template of the model ignores tools: choose a model whose template renders them, or remove "
                "the column 'tools'."
            )
        return rendered
    except (TypeError, UnicodeEncodeError):
        check_characters(list(messages), "The conversation")
        raise
    except TemplateError as error:
        if [message["role"] for message in messages[:2]] == ["system", "user"]:
            system, user = messages[:2]
            first = {**user, "content": f"{system['content']}\n\n{user['content']}"}
            return apply_chat_template(tokenizer, [first, *messages[2:]], tools, **options)
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"The chat template of the model rejects a conversation of {roles} ({error}): use only roles that it "
            "accepts, or give the tokenizer another template, such as that of SmolLM2 or Qwen2.5."
        ) from error


def special_texts(tokenizer: Any) -> list[str]:
    """The texts that the tokenizer reads as special tokens, wherever they stand."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return sorted({*tokenizer.all_special_tokens, *(str(one) for one in added if one.special)}, key=len)[::-1]


def check(module: Any, tokenizer: Any) -> None:
    """Raise UserError for another model's tokenizer, and for a template without a generation prompt.

    A few special tokens may lie beyond the model's embeddings; texts with one are refused (`check_ids`). Warns if only
    the special tokens differ.
    """
    rows, tokens = module.get_input_embeddings().num_embeddings, len(tokenizer)
    vocabulary = tokenizer.get_vocab().values()
    unused = _unused(tokenizer, [i for i in vocabulary if i >= rows])
    if tokens > rows and not unused:
        raise UserError(
            f"The tokenizer has {tokens} tokens and the model {rows}: it is another model's, or its vocabulary grew. "
            "If it grew, call model.resize_token_embeddings(len(tokenizer)) and save both."
        )
    if tokens < LEAST_TOKENS * rows:
        raise UserError(f"The tokenizer has {tokens} tokens and the model {rows}: it belongs to another model.")
    highest = max(vocabulary, default=0)
    if highest >= rows and not unused:
        raise UserError(f"The tokenizer has a token {highest} and the model ends at {rows - 1}: it is another model's.")
    _check_special(module, tokenizer)
    if tokenizer.chat_template is None:
        return
    question = [{"role": "user", "content": "question"}]

    def rendered(messages: list[Message], generation: bool) -> str:
        return str(apply_chat_template(tokenizer, messages, add_generation_prompt=generation, tokenize=False))

    prompt = rendered(question, True)
    answered = rendered([*question, {"role": "assistant", "content": "reply"}], False)
    if prompt == rendered(question, False) and not answered.removeprefix(prompt).lstrip().startswith("reply"):
        raise UserError(
            "The chat template of the model drops the generation prompt: it renders the same with and without "
            "add_generation_prompt, so the model would continue the user's turn. Give the tokenizer a template that "
            "opens the assistant's turn."
        )


def check_ids(module: Any, tokenizer: Any, ids: list[int]) -> list[int]:
    """The same ids. Raises UserError for one beyond the model's embeddings, with its text."""
    rows = module.get_input_embeddings().num_embeddings
    if ids and max(ids) >= rows:
        raise UserError(
            f"The text has the special token {tokenizer.decode([max(ids)])!r}, for which the model has no embedding: "
            "leave it out. If you added it, call model.resize_token_embeddings(len(tokenizer)) and save both."
        )
    return ids


def _unused(tokenizer: Any, beyond: list[int]) -> bool:
    """Whether the ids `beyond` the embeddings are a few special tokens, none of which begins, ends or pads a text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    used = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    return 0 < len(beyond) <= MOST_UNUSED and all(i in added and added[i].special and i not in used for i in beyond)


def _check_special(module: Any, tokenizer: Any) -> None:
    """Warn if tokenizer and model both name two or more special tokens and agree on none.

    A single difference is common: chat models often have another end token than their base.
    """
    both: dict[str, tuple[int, set[int]]] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own, expected = getattr(tokenizer, name, None), set[int]()
        for config in (module.config, getattr(module, "generation_config", None)):
            value = getattr(config, name, None)
            expected |= set(value if isinstance(value, list) else [] if value is None else [value])
        if own is not None and expected:
            both[name[:3]] = own, expected
    if len(both) > 1 and not any(own in expected for own, expected in both.values()):
        ours = ", ".join(f"{name} {own}" for name, (own, _) in both.items())
        theirs = ", ".join(f"{name} {'/'.join(map(str, sorted(ids)))}" for name, (_, ids) in both.items())
        warnings.warn(
            f"The tokenizer may be another model's: its special tokens are {ours}, and the model's {theirs}. If so, "
            "every token id means something else to the model: use the tokenizer in the model's own folder.",
            stacklevel=3,
        )
