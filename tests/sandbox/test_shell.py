"""The shell: trees go in and come out, commands are limited, and none of them leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from foresight.errors import UserError
from foresight.sandbox import shell
from foresight.sandbox.shell import Limits
from tests.sabotage import sabotaged_by

held = shell.protections()
needed = pytest.mark.skipif(
    not all(held[layer] for layer in shell.NEEDED), reason="no namespaces or no Landlock on this machine"
)
QUICK = Limits(seconds=3.0)

# Commands that print LEFT if they succeed, and then do no harm: the twin runs them without a sandbox.
# SECRET, FOLDER, CANARY and PORT are of the test.
ATTEMPTS = {
    "read a secret": "cat SECRET && echo LEFT",
    "read a secret by a link": "ln -s SECRET mine && cat mine && echo LEFT",
    "read the accounts": "cat /etc/passwd && echo LEFT",
    "list the root": "ls / && echo LEFT",
    "list processes": "ls /proc && echo LEFT",
    "climb by dots": "cat ../../../../../etc/passwd && echo LEFT",
    "write outside": "echo x > FOLDER/new && echo LEFT",
    "append to a secret": "echo x >> SECRET && echo LEFT",
    "remove a secret": "rm -f SECRET && echo LEFT",
    "link a secret": "ln SECRET mine && echo LEFT",
    "move a secret": "mv SECRET mine && echo LEFT",
    "change its rights": "chmod 777 SECRET && echo LEFT",
    "change its time": "touch -d 2001-01-01 SECRET && echo LEFT",
    "change its rights when it is open": """perl -e 'sysopen(F, "SECRET", 3) && chmod(0777, *F) && print "LEFT\\n"'""",
    "change its time when it is open": """perl -e 'sysopen(F, "SECRET", 3) && utime(1, 1, *F) && print "LEFT\\n"'""",
    "make a device": "mknod null c 1 3 && echo LEFT",
    "make a pipe outside": "mkfifo FOLDER/pipe && echo LEFT",
    "start its own program": "cp /bin/true mine && chmod +x mine; ./mine && echo LEFT",
    "kill a process": "kill -9 CANARY && echo LEFT",
    "connect": "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", PORT), 1)' && echo LEFT",
    "leave its session": "setsid true && echo LEFT",
    "mount": 'mount -t tmpfs none . && umount "$PWD" && echo LEFT',
    "open a namespace": "unshare -r true && echo LEFT",
    "change the root": "chroot . /bin/true && echo LEFT",
    "raise its limits": "(ulimit -n 100000) && echo LEFT",
    "fill the disk": "head -c 50000000 /dev/zero > big && echo LEFT",
    "read the environment": 'test -n "$MARK_OF_THE_TEST" && echo LEFT',
    "find an open file": "for n in 3 4 5 6 7 8 9; do (true <&$n) 2> .e && echo LEFT; done; rm -f .e",
}


def unconfined(original):
    """The same shell without a sandbox, in a folder."""

    def mutant(command, files, limits):
        made = subprocess.run(
            ["/bin/sh", "-c", command], cwd=os.environ["LAX"], capture_output=True, text=True, timeout=10, check=False
        )
        return list(shell.NEEDED), shell.Outcome("ok", made.returncode, made.stdout, {})

    return mutant


@needed
@sabotaged_by("foresight.sandbox.shell._process", unconfined)
def test_no_command_leaves_the_sandbox(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lax").mkdir()
    secret, folder = own / "secret", own / "folder"
    before = secret.stat()
    monkeypatch.setenv("LAX", str(tmp_path / "lax"))
    monkeypatch.setenv("MARK_OF_THE_TEST", "1")
    canary = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    server = socket.create_server(("127.0.0.1", 0))
    words = {
        "SECRET": str(secret), "FOLDER": str(folder), "CANARY": str(canary.pid),
        "PORT": str(server.getsockname()[1]),
    }  # fmt: skip
    script = ""
    for number, command in enumerate(ATTEMPTS.values()):
        for word, value in words.items():
            command = command.replace(word, value)
        script += f"mkdir t{number}; (cd t{number}; {command}) 2>&1 | sed s/^LEFT$/{number}:LEFT/; rm -rf t{number}\n"
    try:
        found = shell.run(script, {}, Limits(seconds=20.0))
        assert found.status == "ok", found
        names = list(ATTEMPTS)
        left = [names[int(line.split(":")[0])] for line in found.printed.splitlines() if line.endswith(":LEFT")]
        assert not left
        assert canary.poll() is None
        assert secret.read_text() == "it is 42" and not list(folder.iterdir())
        after = secret.stat()
        assert (after.st_mtime, after.st_mode, after.st_ino) == (10**9, before.st_mode, before.st_ino)
    finally:
        canary.kill()
        canary.wait()
        server.close()


@needed
def test_trees_go_in_and_come_out() -> None:
    found = shell.run("sed -i s/x/y/ a/b; mv a/b c; mkdir e; ln -s c l; grep -c y c; exit 3", {"a/b": "x\n"}, QUICK)
    assert (found.status, found.code, found.files) == ("ok", 3, {"a/": "", "c": "y\n", "e/": ""})
    assert found.printed.endswith("1\n")


@needed
def test_commands_end_with_what_they_started() -> None:
    late = shell.run("echo begun; sleep 50 & sleep 50", {"a": "1"}, Limits(seconds=0.3))
    assert (late.status, late.printed, late.files) == ("timeout", "begun\n", {"a": "1"}) and late.seconds < 3
    assert shell.run("(trap '' HUP; sleep 50) & echo here", {}, QUICK).printed == "here\n"
    assert shell.run("kill -9 $PPID; kill -INT $PPID; echo alive", {}, QUICK).printed.endswith("alive\n")
    many = shell.run("for i in $(seq 40); do sleep 50 & done; wait", {}, QUICK)
    assert (many.status, many.code) == ("ok", 2) and "annot fork" in many.printed
    assert shell.run("f() { f | f & }; f", {}, QUICK).status == "ok"  # the first may end before any fork fails


@needed
def test_output_is_limited() -> None:
    loud = shell.run("yes | head -c 100000", {}, Limits(seconds=3.0, printed=10))
    assert loud.status == "ok" and loud.printed.startswith("y\ny\ny\ny\ny\n ...") and len(loud.printed) < 50
    large = shell.run("head -c 5000 /dev/zero > a", {"b": ""}, Limits(seconds=3.0, tree_bytes=1000))
    assert (large.status, large.files) == ("output", {"b": ""}) and "1,000 bytes" in large.error
    long = shell.run(f"echo said; echo x > {'n' * 210}", {"b": ""}, QUICK)
    assert (long.status, long.printed, long.files) == ("output", "said\n", {"b": ""})
    assert long.error.startswith("a path has more than 200 characters: nnn")


@pytest.mark.parametrize("path", ["/etc/passwd", "../a", "a/../../b", "", "a\0b", "x" * 300])
def test_paths_stay_inside(path: str) -> None:
    with pytest.raises(UserError, match="is no path in the tree"):
        shell.check(path)


def test_without_protection_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "protections", lambda: dict.fromkeys(shell.LAYERS, True) | {"landlock": False})
    with pytest.raises(UserError, match="cannot be protected on this machine: it lacks landlock"):
        shell.run("true", {})
