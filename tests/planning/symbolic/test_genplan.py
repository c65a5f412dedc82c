"""The dialogue: what a model is asked, which faults it gets back, and when its program is evaluated."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from benchmarks.genplan import FAULTS, faults
from foresight.envs.pddl import domains, programs
from foresight.errors import UserError
from foresight.planning.generation import chat
from foresight.planning.symbolic import genplan
from tests.sabotage import sabotaged_by

RIGHT = programs.plain(programs.written("gripper"))
PROMPTS, TRAINING, EVALUATION, _ = genplan.problems("gripper", 2, "own", 0)
TASK = PROMPTS, TRAINING[:3], EVALUATION


def silent(original):
    """Every fault is called an exception."""

    def mutant(problem, result, seconds):
        found = original(problem, result, seconds)
        return programs.Outcome("exception", found.message) if found.fault else found

    return mutant


@sabotaged_by("foresight.envs.pddl.programs.outcome", silent)
def test_every_class_of_fault_is_named_and_repaired():
    found = faults("spanner", seconds=1.0)
    assert {name: one["faults"] for name, one in found.items()} == {name: [name, ""] for name in FAULTS}
    assert all(one["solved"] == 1 for one in found.values())


def blocks(*programs_):
    return ["A summary.", "A strategy.", *(f"Here it is.\n```python\n{p}\n```\nDone." for p in programs_)]


def test_the_dialogue_has_the_published_order_and_ends_when_training_is_solved():
    made = genplan.write(genplan.scripted(blocks("def get_plan(*x): return []", RIGHT)), *TASK)
    asked = [m["content"] for m in made.messages if m["role"] == "user"]
    assert len(asked) == 4 and "(define (domain gripper)" in asked[0] and "summary" in asked[0]
    assert "without using search" in asked[1] and "def get_plan(objects, init, goal)" in asked[2]
    assert "Fix the code." in asked[3] and "ends before the goal" in asked[3]
    assert made.faults == ["unmet precondition", ""] and made.solved == 1
    short = genplan.write(genplan.scripted(blocks(RIGHT)[2:]), *TASK, thoughts=False)
    assert len(short.messages) == 2 and "(define (domain" in short.messages[0]["content"] and short.solved == 1


def test_problems_are_abbreviated_to_ten_of_each():
    text = genplan.abbreviated(TASK[2][0])
    rooms = next(line for line in text.splitlines() if line.startswith("  (room "))
    assert rooms.count("(room") == 10 and "more" in rooms


@pytest.mark.parametrize("count", [9, 10, 11, 15])
def test_every_line_of_objects_ends_with_their_type(count):
    problem = domains.problem("heavy", {"items": count}, np.random.default_rng(0))
    lines = genplan.abbreviated(problem).partition("init:")[0].splitlines()[1:]
    assert {line.rpartition(" - ")[2] for line in lines} == set(problem.objects.values())
    items = next(line for line in lines if line.endswith(" - item"))
    more = f" ... and {count - 10} more" if count > 10 else ""
    assert len(items.split()) == min(count, 10) + 2 + 4 * bool(more) and items.endswith(f"{more} - item")


def test_helpers_persist_and_code_that_does_not_compile_is_left_out():
    parts = ["def first(x):\n    return min(x)", "def broken(:", "no code here", RIGHT]
    made = genplan.write(genplan.scripted([*blocks(*parts[:2]), parts[2], *blocks(RIGHT)[2:]]), *TASK)
    assert made.faults == ["exception"] * 3 + [""]
    assert "does not compile" in made.messages[8]["content"] and "no Python code" in made.messages[10]["content"]
    assert "def first(x)" in made.program and "broken" not in made.program and made.solved == 1


FIRST = "from __future__ import annotations\n"


@pytest.mark.parametrize(
    ("piece", "right", "faults"),
    [
        ("return plan", RIGHT, ["exception", ""]),
        ("def get_plan(*x): return []", programs.written("gripper"), ["unmet precondition", ""]),
        (f"{FIRST}def get_plan(*x): return []", programs.written("gripper"), ["unmet precondition", ""]),
        (f"def get_plan(*x): return []\n{FIRST}", RIGHT, ["unmet precondition", ""]),
        ("from __future__ import braces", RIGHT, ["exception", ""]),
    ],
)
def test_no_piece_keeps_a_right_program_after_it_from_counting(piece, right, faults):
    made = genplan.write(genplan.scripted(blocks(piece, right)), *TASK)
    assert made.faults == faults and made.solved == 1


def test_an_error_of_compilation_has_the_line_of_the_answer():
    program, _ = genplan.extended("", f"```python\n{RIGHT}```")
    same, fault = genplan.extended(program, "```python\nplan = []\nreturn plan\n```")
    assert same == program and "'return' outside function (<unknown>, line 2)" in fault.message


CODE = "def get_plan(*task):\n    return []\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"A plan:\n```text\n(move a b)\n```\nThe code:\n```python\n{CODE}```\n",
        f"```bash\npython plan.py\n```\n\n```py\n{CODE}```\n",
        f"```python\n{CODE}```\nIt prints\n```\n(move a b)\n```\n",
        f"```python3\n{CODE}```\n",
        f"Here it is:\n```python\n{CODE}```\nDone.".replace("\n", "\r\n"),
        f"Here it is: ```python\n{CODE.rstrip()}```\nDone.",
        f"```\n{CODE}```\n```text\n(move a b)\n```",
        f"Read this.\n```python\n{CODE}",
    ],
)
def test_only_the_blocks_of_python_in_an_answer_are_the_program(answer):
    program, fault = genplan.extended("", answer)
    assert fault is None and program.strip() == CODE.strip()


def test_after_the_last_round_the_program_is_evaluated_as_it_is():
    wrong = "def get_plan(*x): return []"
    made = genplan.write(genplan.scripted(blocks(wrong, wrong)), *TASK, rounds=1)
    assert made.faults == ["unmet precondition"] * 2 and made.solved == 0
    assert made.classes == {"unmet precondition": 2}
    nothing = genplan.write(genplan.scripted(["?", "?", "?"]), *TASK, rounds=0)
    assert nothing.program == "" and nothing.solved == 0
    with pytest.raises(UserError, match="rounds of at least 0, not -1"):
        genplan.write(genplan.scripted([]), *TASK, rounds=-1)


def test_a_recorded_dialogue_is_replayed_and_another_question_is_refused(tmp_path):
    made = genplan.write(genplan.scripted(blocks("def get_plan(*x): return []", RIGHT)), *TASK)
    file = tmp_path / "dialogue.json"
    file.write_text(json.dumps(made.messages))
    again = genplan.write(genplan.recorded(file), *TASK)
    assert again.messages == made.messages and again.program == made.program
    with pytest.raises(UserError, match="was recorded with other questions, from message 1 on"):
        genplan.write(genplan.recorded(file), *genplan.problems("ferry", 1)[:3])
    for text in ("{}", "3", "[1]"):
        file.write_text(text)
        with pytest.raises(UserError, match="must be a list of messages"):
            genplan.recorded(file)


def test_any_server_with_the_chat_api_answers():
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "m"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            content = f"```python\n{RIGHT}```" if len(body["messages"]) == 5 else "Yes."
            self.reply({"choices": [{"message": {"role": "assistant", "content": content}}]})

        def reply(self, document):
            data = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        made = genplan.write(chat.served(f"http://127.0.0.1:{server.server_port}/v1", 300), *TASK)
    finally:
        server.shutdown()
        server.server_close()
    assert made.solved == 1 and seen[0]["model"] == "m" and seen[0]["max_tokens"] == 300
