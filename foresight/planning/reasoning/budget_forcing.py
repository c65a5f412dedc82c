"""Budget forcing: s1, Muennighoff et al. 2025 (arXiv:2501.19393), §3.1.

The end of a thought is suppressed and replaced by "Wait", so that the model checks and continues; a thought that is too
long is ended by force, so that the model answers. It changes nothing but the length of one answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresight.errors import UserError
from foresight.planning.reasoning.mind import Answer, Ask, Policy, Problem, Steps, Thought

CLOSE = "</think>"


def budget_forcing(
    problem: Problem, ignore: int = 1, wait: str = "Wait", thought_tokens: int = 0, close: str = ""
) -> Steps:
    """One answer whose end is suppressed `ignore` times, each time followed by the text `wait`.

    In a task of traces the end is that of the thought, else that of the answer. A thought of `thought_tokens` (0: the
    most of an answer) is ended with the text `close`, by default "</think> <answer>" in a task of traces.
    """
    if ignore < 0 or thought_tokens < 0:
        raise UserError(f"ignore is {ignore} and thought_tokens {thought_tokens}: both must be at least 0.")
    traced = problem.task.traced
    tree, prefix, text, node = problem.tree(), problem.prompt, "", 0
    limit, policy = thought_tokens or problem.mind.max_new_tokens, problem.mind.policy
    close = close or (f"{CLOSE} <answer>" if traced else "")
    for turn in range(ignore + 1):
        replies = yield Ask((prefix,), 1, limit, (CLOSE,) if traced else ())
        if not replies[0]:
            break
        thought: Thought = replies[0][0]
        at_end = thought.ended or (traced and thought.text.endswith(CLOSE))
        if at_end and turn < ignore:
            body = cut(policy, thought.tokens, thought.text.removesuffix(CLOSE) if traced else thought.text)
            prefix += body + problem.encode(wait)
            node = tree.add(policy.decode(body), (node,))
            node = tree.add(wait, (node,), "forced")
            text += policy.decode(body) + wait
            continue
        prefix, text = prefix + thought.tokens, text + thought.text
        node = tree.add(thought.text, (node,), "answer" if thought.ended else "thought")
        if thought.ended:
            break
        if close and not at_end:
            prefix, text = prefix + problem.encode(close), text + close
            node = tree.add(close, (node,), "forced")
        last = yield Ask((prefix,), 1)
        for thought in last[0]:
            text, node = text + thought.text, tree.add(thought.text, (node,), "answer")
        break
    tree.choose(node)
    return Answer(text, ((text, 0.0),), tree)


def cut(policy: Policy, tokens: Sequence[int], text: str) -> tuple[int, ...]:
    """The first tokens, without those that end an answer, whose text is no longer than `text`."""
    kept = [token for token in tokens if token not in policy.stop_ids]
    while kept and len(policy.decode(kept)) > len(text):
        kept.pop()
    return tuple(kept)
