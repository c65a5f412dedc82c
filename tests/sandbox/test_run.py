"""The sandbox: what programs return, how they end, and that they cannot leave it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from foresight.errors import UserError
from foresight.sandbox import confine, process
from foresight.sandbox.run import Limits, Result, protections, run
from tests.sabotage import sabotaged_by
from tests.sandbox.escapes import ATTEMPTS

QUICK = Limits(seconds=0.4)


def unconfined(original):
    """A child that reports all layers and has none."""
    layers = repr(list(confine.LAYERS))
    return changed(original, f"\ndef confine(place, limits):\n    os.chdir(place)\n    return {layers}\n")


def changed(original, lacks):
    """A child whose `confine.py` ends with `lacks`."""

    def mutant(command, env, pass_fds=(), stdin=None, quiet=False, cwd=None):
        folder = Path(command[5]).parent
        lax = Path(cwd or os.environ["LAX"])
        shutil.copy(folder / "child.py", lax)
        (lax / "confine.py").write_text((folder / "confine.py").read_text() + lacks)
        return original([*command[:5], str(lax / "child.py"), *command[6:]], env, pass_fds, stdin, quiet)

    return mutant


@sabotaged_by("foresight.sandbox.process.start", unconfined)
def test_no_attempt_leaves_the_sandbox(tmp_path, own, monkeypatch):
    assert len(ATTEMPTS) >= 40
    monkeypatch.setenv("LAX", str(tmp_path))
    before = protections()
    names = [name for name, (layer, _) in ATTEMPTS.items() if before[layer]]
    source = "outside = {}\ndef attempt(name, given):\n    return bool(globals()[name](given))\n"
    for i, name in enumerate(names):
        source += f"def try_{i}(outside):\n{textwrap.indent(ATTEMPTS[name][1], '    ')}\n"
    canary = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(f"\0foresight-{os.getpid()}")
    unix.listen()
    try:
        outside = {
            "secret": str(own / "secret"), "text": "it is 42", "folder": str(own / "folder"),
            "canary": canary.pid, "tcp": tcp.getsockname()[1], "abstract": f"foresight-{os.getpid()}",
        }  # fmt: skip
        results = run(source, "attempt", [[f"try_{i}", outside] for i in range(len(names))], Limits(seconds=1.5))
        escaped = [name for name, result in zip(names, results, strict=True) if result.value]
        assert not escaped
        assert {r.status for r in results} <= {"ok", "exception", "memory", "ended"}, results
        assert canary.poll() is None
        assert (own / "secret").read_text() == "it is 42" and not list((own / "folder").iterdir())
    finally:
        canary.kill()
        canary.wait()
        tcp.close()
        unix.close()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.skipif(not protections()["landlock"], reason="no Landlock on this machine")
def test_nothing_is_truncated_where_landlock_knows_no_right_for_it(version, own, tmp_path, monkeypatch):
    """Linux 5.13 to 6.1. What can be read is the worst case."""
    monkeypatch.setenv("LAX", str(tmp_path))
    older = f"\nALL_FILES = {{v: rights for v, rights in ALL_FILES.items() if v <= {version}}}\n"
    older += f"_readable = readable\ndef readable():\n    return [*_readable(), {str(own)!r}]\n"
    monkeypatch.setattr(process, "start", changed(process.start, older))
    bodies = [body for name, (_, body) in ATTEMPTS.items() if name.startswith("truncate")]
    source = "def attempt(name, *given):\n    return globals()[name](*given)\n"
    for i, body in enumerate(bodies):
        source += f"def try_{i}(outside):\n{textwrap.indent(body, '    ')}\n"
    source += f"def read():\n    return open({str(own / 'secret')!r}).read()\n"
    source += "def mine():\n    open('a', 'w').write('abc')\n    with open('a', 'r+') as file: file.truncate(2)\n"
    source += "    first = open('a').read()\n    open('a', 'w').write('d')\n    return first + open('a').read()\n"
    calls = [[f"try_{i}", {"secret": str(own / "secret")}] for i in range(len(bodies))]
    *tried, read, mine = run(source, "attempt", [*calls, ["read"], ["mine"]])
    assert len(tried) == 3 and all("PermissionError" in one.error for one in tried), tried
    assert (read.value, mine.value) == ("it is 42", "abd")
    assert (own / "secret").read_text() == "it is 42"


def test_every_layer_is_known_and_reported():
    held = protections()
    assert list(held) == list(confine.LAYERS) and held["limits"]
    if sys.platform.startswith("linux") and Path("/proc/sys/kernel/seccomp").exists():
        assert held["seccomp"]


MANY = """
import itertools, sys, time
count = 0
def pick(name, *rest):
    return globals()[name](*rest)
def double(x): return 2 * x
def state():
    global count
    count += 1
    return count
def order(): return list({"ab", "cd", "ef", "gh", "ij"})
def fail(): return {}["missing"]
def loop():
    while True: pass
def sleep(): time.sleep(60)
def stubborn():
    while True:
        try:
            while True: pass
        except BaseException: pass
def leave(): sys.exit(3)
def die():
    import os
    os._exit(3)
def shout():
    while True: print("x" * 1000)
def say(): print("hello"); return 1
def deep(): return deep()
def lazy(): return (x for x in range(3))
def strange(): return {1, 2}
def huge(): return "x" * (2 * 2**20)
def need(): import nothing_of_that_name
def forge(line='{"status": "great", "value": 7}'):
    import os
    for n in range(3, 4096):
        try: os.write(n, line.encode() + b'\\n')
        except OSError: pass
    return 1
def forge_time(): return forge('{"status": "ok", "value": 7, "seconds": 1' + 400 * '0' + '}')
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Result]:
    names = ["double", "state", "say", "fail", "leave", "deep", "lazy", "strange", "shout", "need", "order", "loop",
             "stubborn", "die", "huge"]  # fmt: skip
    calls = [[name, 21] if name == "double" else [name] for name in names]
    return dict(zip(names, run(MANY, "pick", calls, Limits(seconds=0.4, result_mib=1)), strict=True))


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("double", "ok", ""),
        ("fail", "exception", "KeyError: 'missing'"),
        ("leave", "exception", "SystemExit: 3"),
        ("deep", "exception", "RecursionError"),
        ("need", "exception", "No module named 'nothing_of_that_name'"),
        ("lazy", "value", "it returned a generator, which is not JSON"),
        ("strange", "value", "it returned a set, which is not JSON"),
        ("shout", "output", "it printed more than 65536 characters"),
        ("loop", "timeout", "it did not answer within 0.4 seconds"),
        ("stubborn", "timeout", "it did not answer within 0.4 seconds"),
        ("die", "ended", "its process ended, with the exit code 3"),
        ("huge", "output", "it returned more than 1 MiB"),
    ],
)
def test_each_end_has_its_status(outcomes, name, status, said):
    assert outcomes[name].status == status
    assert said in outcomes[name].error


def test_values_traces_and_prints_come_back(outcomes):
    assert outcomes["double"].value == 42
    assert outcomes["state"].value == 1 and outcomes["say"].printed == "hello\n"
    assert 'File "<program>", line' in outcomes["fail"].trace and "child.py" not in outcomes["fail"].trace
    assert "in fail\nKeyError" in outcomes["fail"].trace


def test_calls_share_nothing_and_sets_have_one_order():
    first, second, *orders = run(MANY, "pick", [["state"], ["state"], ["order"]], QUICK)
    assert first.value == second.value == 1
    assert orders[0].value == run(MANY, "pick", [["order"]], QUICK)[0].value


def test_a_forged_result_is_no_result():
    for name in ("forge", "forge_time"):
        found = run(MANY, "pick", [[name]], QUICK)
        assert found[0].status == "ended" and found[0].value is None


def test_a_program_that_does_not_compile_or_lacks_the_function_is_reported():
    found = run("def f(:\n", "f", [[], []], QUICK)
    assert [r.status for r in found] == ["exception"] * 2 and "line 1" in found[0].trace
    assert "defines no function g" in run("f = 1", "g", [[]], QUICK)[0].error


def test_limits_and_arguments_are_checked():
    with pytest.raises(UserError, match=r"seconds must be at least 0.01, not 0"):
        Limits(seconds=0)
    with pytest.raises(UserError, match="memory_mib must be at least 64, not 1"):
        Limits(memory_mib=1)
    with pytest.raises(UserError, match="must be JSON"):
        run("def f(x): return 1", "f", [[{1}]])
    assert run("def f(x): return 1", "f", []) == []


def test_a_killed_process_takes_what_it_started_along(tmp_path):
    """Also what the reward function of a user leaves behind."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()"
    reader, writer = os.pipe()
    source, _ = os.pipe()
    child = process.start(
        [sys.executable, "-S", "-c", f"import os; os.dup2({writer}, 1); {script}"], os.environ, [writer],
        stdin=os.fdopen(source, "rb"),
    )  # fmt: skip
    pid = int(os.read(reader, 32))
    assert process.kill(child) is None
    os.close(writer)
    assert os.read(reader, 1) == b""  # the grandchild held the other end, too
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
