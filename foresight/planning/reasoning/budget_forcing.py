"""Budget forcing: s1, Muennighoff et al. 2025 (arXiv:2501.19393), §3.1.

The end of a thought is suppressed and replaced by "Wait", so that the model checks and continues; a thought that is too
long is ended by force, so that the model answers. It changes nothing but the length of one answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresight.errors import UserError
from foresight.planning.reasoning.beam import last
from foresight.planning.reasoning.mind import Answer, Ask, Policy, Problem, Steps, Thought

CLOSE = "</think>"


def budget_forcing(
    problem: Problem, ignore: int = 1, wait: str = "Wait", thought_tokens: int = 0, close: str = ""
) -> Steps:
    """One answer whose end is suppressed `ignore` times, each time followed by the text `wait`.

    In a task of traces the end is that of the thought, else that of the answer; it stays where neither the budget nor
    the context has room for more. A thought of `thought_tokens` (0: the
    most of an answer) is ended with the text `close`, by default "</think> <answer>" in a task of traces.
    """
    if ignore < 0 or thought_tokens < 0:
        raise UserError(f"ignore is {ignore} and thought_tokens {thought_tokens}: both must be at least 0.")
    traced = problem.task.traced
    tree, tokens, text, node = problem.tree(), tuple[int, ...](), "", 0
    limit, policy = thought_tokens or problem.mind.max_new_tokens, problem.mind.policy
    close = close or (f"{CLOSE} <answer>" if traced else "")

    def add(more: Sequence[int], kind: str) -> tuple[tuple[int, ...], str, int]:
        whole = policy.decode((*tokens, *more))  # the text of all: a character may be split over two thoughts
        return (*tokens, *more), whole, tree.add(last(text, whole), (node,), kind)

    before = tokens, text, node
    for turn in range(ignore + 1):
        replies = yield Ask((problem.prompt + tokens,), 1, limit, (CLOSE,) if traced else ())
        if replies[0]:
            thought: Thought = replies[0][0]
        elif turn:
            tokens, text, node = before  # nothing follows `wait`: the last thought has its end again
        else:
            break
        at_end = thought.ended or (traced and CLOSE in thought.text)
        if at_end and replies[0] and turn < ignore:
            before = tokens, text, node
            body = cut(policy, thought.tokens, thought.text.partition(CLOSE)[0] if traced else thought.text)
            tokens, text, node = add(body, "thought")
            tokens, text, node = add(problem.encode(wait), "forced")
            continue
        tokens, text, node = add(thought.tokens, "answer" if thought.ended else "thought")
        if thought.ended:
            break
        if close and not at_end:
            tokens, text, node = add(problem.encode(close), "forced")
        answers = yield Ask((problem.prompt + tokens,), 1)
        for thought in answers[0]:
            tokens, text, node = add(thought.tokens, "answer")
        break
    tree.choose(node)
    return Answer(text, ((text, 0.0),), tree)


def cut(policy: Policy, tokens: Sequence[int], text: str) -> tuple[int, ...]:
    """The first tokens, without those that end an answer, whose text is no longer than `text`."""
    kept = [token for token in tokens if token not in policy.stop_ids]
    while kept and len(policy.decode(kept)) > len(text):
        kept.pop()
    return tuple(kept)
