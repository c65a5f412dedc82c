"""The shell's task: its script earns everything, only the end state counts, and wrong paths are refused."""

from __future__ import annotations

import pytest

from foresight.envs.make import make as make_env
from foresight.envs.tools import make, tool
from foresight.envs.tools.episode import Toolbox
from foresight.envs.tools.shell import COMMANDS, Shell
from foresight.errors import UserError
from foresight.sandbox import shell
from tests.sabotage import sabotaged_by

held = shell.protections()
needed = pytest.mark.skipif(
    not all(held[layer] for layer in shell.NEEDED), reason="no namespaces or no Landlock on this machine"
)
ROW = {"files": {"a/b.txt": "x\n"}, "wanted": {"a/b.md": "x\n"}, "request": "Rename it."}


@needed
def test_scripts_earn_the_whole_outcome_and_silence_none() -> None:
    task = make_env("shell", "text", size=60)
    kinds = {" ".join(row.question.split()[:2]) for row in task.train}
    assert len({kind.split()[0] for kind in kinds}) == len(COMMANDS)
    assert len(make.demonstrations(task, 7)) == 7  # raises where a script earns less than 1
    episode = task.episode(task.train[0])
    episode.turn("done")
    assert episode.parts()["outcome"] == 0


@needed
@sabotaged_by("foresight.envs.tools.shell.Shell.reward", lambda real: lambda self, answer: 1.0)
def test_the_tree_at_the_end_is_graded_and_not_shared() -> None:
    first, second = Toolbox(Shell(), ROW), Toolbox(Shell(), ROW)
    reply = first.turn(tool.write("run", command="mv a/b.txt a/b.md; ls a; false"))
    assert "b.md\n\n(exit code 1)" in reply.message["content"]
    assert "a/b.txt 2" in second.turn(tool.write("list_files")).message["content"]
    for episode in (first, second):
        episode.turn("done")
    assert (first.parts()["outcome"], second.parts()["outcome"]) == (1, 0)


def test_files_are_read_and_written_inside_the_tree() -> None:
    episode = Toolbox(Shell(), ROW)
    assert ">x\n<" in episode.turn(tool.write("read_file", path="a/b.txt")).message["content"]
    for path in ("/etc/passwd", "../c", "a", "a/b.txt/c", "d/"):
        assert "error: " in episode.turn(tool.write("write_file", path=path, text="y")).message["content"]
    assert "error: " in episode.turn(tool.write("read_file", path="/etc/passwd")).message["content"]
    episode.turn(tool.write("write_file", path="c", text="y"))
    assert "c 1" in episode.turn(tool.write("list_files")).message["content"]


def test_a_file_has_one_path_however_it_is_spelled() -> None:
    made = Shell()
    made.reset(ROW)
    made.write_file("./a//b.txt", "new\n")
    assert made.list_files() == "a/b.txt 4" and made.read_file("a/./b.txt") == "new\n"
    for path in ("./a", "a/.", "./a/b.txt/c"):
        with pytest.raises(ValueError, match=r"folder|has a name"):
            made.write_file(path, "y")
    made.reset({**ROW, "wanted": {"a/b.txt": "x\n", "count.txt": "1\n"}})
    made.write_file("./count.txt", "1\n")
    assert made.reward("done") == 1


@needed
def test_commands_run_after_a_folder_was_to_be_written() -> None:
    made = Shell()
    made.reset(ROW)
    with pytest.raises(ValueError, match="is a folder"):
        made.write_file("./a", "y")
    assert made.run("ls") == "a\n"


def test_without_protection_there_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "protections", lambda: dict.fromkeys(shell.LAYERS, False))
    with pytest.raises(UserError, match="cannot be protected"):
        make_env("shell", "text")
