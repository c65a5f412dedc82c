"""Attempts to leave the sandbox: expressions and bodies that return something true if they succeed.

`outside` has the `secret` file and its `text`, a `folder` to write to, a `canary` process, a `tcp` port and an `abstract`
Unix socket of the test. None of them does harm where it succeeds.
"""

# ruff: noqa: E501

from __future__ import annotations

# name: (the layer that stops it, body of a function of `outside`)
ATTEMPTS: dict[str, tuple[str, str]] = {
    # files
    "read a secret": ("landlock", "return open(outside['secret']).read() == outside['text']"),
    "read a secret by pathlib": ("landlock", "import pathlib; return pathlib.Path(outside['secret']).read_bytes()"),
    "map a secret into memory": (
        "landlock", "import mmap; f = open(outside['secret'], 'rb'); return mmap.mmap(f.fileno(), 0, prot=1)[:]"),
    "read the accounts": ("landlock", "return open('/etc/passwd').read()"),
    "list the root": ("landlock", "import os; return os.listdir('/')"),
    "list a folder": ("landlock", "import os; return os.listdir(outside['folder'])"),
    "read its parent's environment": ("landlock", "import os; return open(f'/proc/{os.getppid()}/environ').read()"),
    "read its own memory map": ("landlock", "return open('/proc/self/maps').read()"),
    "list processes": ("landlock", "import os; return os.listdir('/proc')"),
    "write outside": ("landlock", "open(outside['folder'] + '/new', 'w').write('x'); return True"),
    "append to a file": ("landlock", "open(outside['secret'], 'a').write('x'); return True"),
    "remove a file": ("landlock", "import os; os.remove(outside['secret']); return True"),
    "remove a folder": ("landlock", "import os; os.rmdir(outside['folder']); return True"),
    "rename a file": ("landlock", "import os; os.rename(outside['secret'], outside['secret'] + '2'); return True"),
    "make a folder": ("landlock", "import os; os.mkdir(outside['folder'] + '/new'); return True"),
    "write a module of Python": (
        "landlock", "import os; open(os.path.dirname(os.__file__) + '/planted.py', 'w').write('x = 1'); return True"),
    "write to the device of memory": ("landlock", "open('/dev/mem', 'rb+').write(b'x'); return True"),
    "climb by dots": ("landlock", "return open('../../../../../../../../etc/passwd').read()"),
    "truncate a file": ("seccomp", "import os; os.truncate(outside['secret'], 0); return True"),
    "truncate a file to read": ("seccomp", "import os; return os.open(outside['secret'], os.O_RDONLY | os.O_TRUNC)"),
    "truncate a file to do nothing": ("seccomp", "import os; return os.open(outside['secret'], 3 | os.O_TRUNC)"),
    "link to a secret": ("seccomp", "import os; os.link(outside['secret'], 'mine'); return True"),
    "link symbolically": ("seccomp", "import os; os.symlink(outside['secret'], 'mine'); return open('mine').read()"),
    "change a file's rights": ("seccomp", "import os; os.chmod(outside['secret'], 0o777); return True"),
    "change a file's owner": ("seccomp", "import os; os.chown(outside['secret'], 1, 1); return True"),
    "change a file's time": ("seccomp", "import os; os.utime(outside['secret'], (1, 1)); return True"),
    "make a device": ("seccomp", "import os, stat; os.mknod('null', 0o666 | stat.S_IFCHR, os.makedev(1, 3)); return True"),
    "change the root": ("seccomp", "import os; os.chroot('.'); return True"),
    "fill the disk": (
        "files", "\n".join(("for i in range(50):", " with open(f'{i}', 'wb') as f:", "  f.write(bytes(2**20))", "return True"))),
    "write ten gigabytes": (
        "limits", "\n".join(("f = open('big', 'wb', buffering=0)", "f.seek(10 * 2**30)", "return f.write(b'x')"))),
    # processes
    "fork": ("seccomp", "import os\npid = os.fork()\nif not pid: os._exit(0)\nreturn pid"),
    "run a program": ("seccomp", "import subprocess; return subprocess.run(['/bin/echo', 'x'], capture_output=True).stdout"),
    "run a shell": ("seccomp", "import os; return os.system('exit 0') == 0"),
    "spawn": ("seccomp", "import os, sys; return os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})"),
    "become another program": ("seccomp", "import os, sys; os.execv('/bin/true', ['true'])"),
    "start a process pool": (
        "seccomp", "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); return p.pid"),
    "kill a process": ("seccomp", "import os; os.kill(outside['canary'], 9); return True"),
    "ask for a process": ("seccomp", "import os; os.kill(outside['canary'], 0); return True"),
    "kill its own group": ("seccomp", "import os; os.killpg(0, 0); return True"),
    "have a pipe send signals to a process": (
        "seccomp", "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, outside['canary']); return True"),
    "leave its session": ("seccomp", "import os; return os.setsid() or True"),
    "trace a process": (
        "seccomp", "import ctypes; return ctypes.CDLL(None).ptrace(16, outside['canary'], 0, 0) == 0"),
    "read another process's memory": (
        "seccomp", "import ctypes; return ctypes.CDLL(None).syscall(310, outside['canary'], 0, 0, 0, 0, 0) == 0"),
    "raise a limit of a process": (
        "seccomp", "import resource; return resource.prlimit(outside['canary'], resource.RLIMIT_NOFILE)"),
    "raise its own limit": (
        "limits", "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2); return True"),
    "hide from the scheduler": ("seccomp", "import os; os.nice(-5); return True"),
    "take all memory": ("limits", "x = bytearray(4 * 2**30); return len(x)"),
    # network
    "connect by TCP": (
        "seccomp", "import socket; return socket.create_connection(('127.0.0.1', outside['tcp']), 1)"),
    "send by UDP": ("seccomp", "import socket; return socket.socket(2, 2).sendto(b'x', ('127.0.0.1', outside['tcp']))"),
    "listen": ("seccomp", "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); return True"),
    "connect to an abstract socket": (
        "seccomp", "import socket; s = socket.socket(1, 1); s.connect(b'\\0' + outside['abstract'].encode()); return True"),
    "make a pair of sockets": ("seccomp", "import socket; return socket.socketpair()"),
    "fetch a page": (
        "seccomp", "import urllib.request; return urllib.request.urlopen(f\"http://127.0.0.1:{outside['tcp']}\", timeout=1)"),
    # kernel
    "open a new namespace": ("seccomp", "import ctypes; return ctypes.CDLL(None).unshare(0x10000000) == 0"),
    "mount": ("seccomp", "import ctypes; return ctypes.CDLL(None).mount(b'proc', b'.', b'proc', 0, None) == 0"),
    "unmount its files": ("seccomp", "import ctypes; return ctypes.CDLL(None).umount2(b'.', 2) == 0"),
    "set the host name": ("seccomp", "import socket; socket.sethostname('x'); return True"),
    "load a BPF program": ("seccomp", "import ctypes; return ctypes.CDLL(None).syscall(321, 0, 0, 0) == 0"),
    "use io_uring": (
        "seccomp", "import ctypes; return ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120)) >= 0"),
    "read the kernel's log": ("seccomp", "import ctypes; return ctypes.CDLL(None).klogctl(10, None, 0) >= 0"),
    "take a key": ("seccomp", "import ctypes; return ctypes.CDLL(None).syscall(250, 0, -3, 1) >= 0"),
    "watch page faults": ("seccomp", "import ctypes; return ctypes.CDLL(None).syscall(323, 1) >= 0"),
    "type into the terminal": ("seccomp", "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); return True"),
    # Python
    "import the user's packages": ("limits", "import numpy; return True"),
    "import this library": ("limits", "import foresight; return True"),
    "read the environment": ("limits", "import os; return set(os.environ) - {'PYTHONHASHSEED', 'LC_CTYPE'}"),
    "find an inherited file": (
        "limits", "\n".join(("import os, stat", "for n in range(3, 32):", " try: mode = os.fstat(n).st_mode",
                             " except OSError: continue", " if not stat.S_ISFIFO(mode): return n"))),
    "read the input": ("limits", "import sys; return sys.stdin.read()"),
}  # fmt: skip
