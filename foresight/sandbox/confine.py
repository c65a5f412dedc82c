"""What a process gives up for good: file systems, the network, other processes, most of the kernel.

`confine` is called by the child itself before it runs foreign code; each layer is tried, and reported if it holds:

- limits: CPU time, address space, size and number of files, threads of a user (not of root), no core dump (setrlimit);
- user: no rights of root, for a process of root, if other users can read Python;
- namespaces: no network, no other's shared memory, no host name (user, net, ipc and uts namespaces);
- files: a file system in memory of limited size is the only place to write (mount namespace, tmpfs);
- landlock: everything but Python's own files cannot be read, executed or connected to (Landlock, Linux 5.13);
- seccomp: the system calls that plain Python needs, and no others: no new process, program or socket.

A shell needs `programs`: those of the system may then be read and started, and new processes are in a namespace of
their own (`processes`), which ends with the first of them; seccomp also allows what they need, but still no socket.

This file is loaded by its path, in a process that cannot import this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
import sysconfig
from typing import Any

LAYERS = ("limits", "user", "namespaces", "files", "landlock", "seccomp")
PROCESSES = "processes"  # the layer that only `programs` has
UNPRIVILEGED = 65534
MIB = 2**20

# prctl, unshare and mount: numbers of the kernel's interface, equal on all architectures.
PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS = 1, 4, 22, 38
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x40000000
NEWPID, NEW_ANY = 0x20000000, 0x7E020000  # all flags of clone that make a namespace
CAPBSET_DROP, CAPABILITIES = 24, 64
NOSUID, NODEV, NOEXEC = 2, 4, 8
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14
ALL_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # rights known from this ABI on
NO_WRITES = READ_FILE | READ_DIR
NETWORK = 0b11  # bind and connect of TCP
SCOPED = 0b11  # abstract Unix sockets and signals

# The calls that plain Python needs: (number on x86-64, number on ARM64); None where it has none.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214),
    "newfstatat": (262, 79), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "stat": (4, None), "lstat": (6, None), "statx": (332, 291), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "pwrite64": (18, 68), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "pipe": (22, None), "pipe2": (293, 59), "select": (23, None), "pselect6": (270, 72),
    "poll": (7, None), "ppoll": (271, 73), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getrlimit": (97, 163), "uname": (63, 160), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents64": (217, 61), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "readlink": (89, None), "readlinkat": (267, 78), "umask": (95, 166), "getrandom": (318, 278),
    "set_robust_list": (273, 99), "rseq": (334, 293), "arch_prctl": (158, None), "sysinfo": (99, 179),
    "exit": (60, 93), "exit_group": (231, 94), "restart_syscall": (219, 128), "eventfd2": (290, 19),
    "membarrier": (324, 283), "set_tid_address": (218, 96), "getitimer": (36, 102), "setitimer": (38, 103),
    "alarm": (37, None), "pause": (34, None), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "close_range": (436, 436),
}  # fmt: skip
# What a shell and its programs need besides.
PROGRAM_CALLS: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "wait4": (61, 260), "waitid": (247, 95),
    "kill": (62, 129), "tgkill": (234, 131), "setpgid": (109, 154), "getpgid": (121, 155), "getpgrp": (111, None),
    "getsid": (124, 156), "rt_sigsuspend": (130, 133), "symlink": (88, None), "symlinkat": (266, 36),
    "link": (86, None), "linkat": (265, 37), "creat": (85, None), "fadvise64": (221, 223), "fstatfs": (138, 44),
    "truncate": (76, 45), "fallocate": (285, 47), "getcpu": (309, 168), "fgetxattr": (193, 10), "flistxattr": (196, 13),
    # Of open files only: by a path they would reach files of this user outside, which Landlock does not stop.
    "fchmod": (91, 52), "fchown": (93, 55), "fsetxattr": (190, 7),
}  # fmt: skip
IOCTL, CLONE, CLONE3, TGKILL, PRLIMIT = (16, 29), (56, 220), (435, 435), (234, 131), (302, 261)
UTIMENSAT = (280, 88)  # with a null path, it changes the times of an open file
TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
FCNTL = (72, 25)
# Copies, flags, locks, and the size of a pipe. None that names a process, to which an open file would send signals.
FCNTLS = (*range(8), 36, 37, 38, 1030, 1032)
CLONE_THREAD = 0x10000
OPENS = (((2, None), 1), ((257, 56), 2))  # open and openat, with the place of their flags
# Of their access mode and O_TRUNC, what is refused. Mode 3 is neither to read nor to write: Landlock asks no right for
# it, and it is enough to change the rights and the times of a file. O_TRUNC without a mode to write: Landlock asks a
# right for it from version 3 on only.
OPENING, UNASKED = 0o1003, (0o3, 0o1003, 0o1000)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of `CALLS`, AUDIT_ARCH


def confine(place: str, limits: dict[str, int], programs: bool = False) -> list[str]:
    """Give up everything but what Python needs to compute; returns the `LAYERS` that hold.

    `place` is a directory of the process alone, which becomes its working directory. `limits`: `cpu` seconds,
    `memory`, `file` and `disk` bytes, `files` and `threads`, numbers. With `programs` the caller continues in a forked
    process, and all that it imports is already loaded: files of Python may be out of reach.
    """
    held = []
    linux = sys.platform.startswith("linux")
    libc = ctypes.CDLL(None, use_errno=True) if linux else None
    if linux and os.geteuid() == 0 and _drop_root(place, programs):
        held.append("user")
        ctypes.CDLL(None).prctl(DUMPABLE, 1, 0, 0, 0)  # a change of the user clears it, and /proc/self is then root's
    if libc is not None and _namespaces(libc, NEWPID if programs else 0):
        held.append("namespaces")
        if _private_files(libc, place, limits["disk"], 4096 if programs else 256):
            held.append("files")
        if programs and _first_process():
            held.append(PROCESSES)
    if libc is not None:
        # The child does not outlive the process that waits for it. After the user changed, which forgets this.
        libc.prctl(PDEATHSIG, 9, 0, 0, 0)
    os.chdir(place)
    _limit(limits)
    held.append("limits")
    if libc is not None:
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        if programs:
            for capability in range(CAPABILITIES):  # of the new namespace, for programs that start as its root
                libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
        if _landlock(libc, place if "files" in held else None, programs):
            held.append("landlock")
        libc.prctl(DUMPABLE, 0, 0, 0, 0)  # no other process of this user may read its memory
        if _seccomp(libc, programs):
            held.append("seccomp")
    return [layer for layer in (*LAYERS, PROCESSES) if layer in held]


def say(results: int, reply: dict[str, Any]) -> None:
    """Write a line of JSON, as both kinds of process answer."""
    data = memoryview(json.dumps(reply).encode() + b"\n")
    while data:
        data = data[os.write(results, data) :]


def _first_process() -> bool:
    """Fork into the new namespace of processes, which ends with the child; the parent waits, and exits with it."""
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    return os.getpid() == 1


def _drop_root(place: str, loaded: bool = False) -> bool:
    """Drop the rights of root, unless Python's own files are readable by root only and not all `loaded`."""
    library = os.path.join(os.path.dirname(os.__file__), "os.py")
    os.chown(place, UNPRIVILEGED, UNPRIVILEGED)
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(UNPRIVILEGED, UNPRIVILEGED, 0)
        os.setresuid(UNPRIVILEGED, UNPRIVILEGED, 0)  # 0 is kept until it is known that Python still works
        if loaded or (os.access(library, os.R_OK) and os.access(sys.executable, os.R_OK)):
            os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
            os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
            return True
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.chown(place, 0, 0)
    return False


def _limit(limits: dict[str, int]) -> None:
    """Lower the limits of the process for good. One that is lower already stays."""
    wanted = {
        resource.RLIMIT_CPU: limits["cpu"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["file"],
        resource.RLIMIT_NOFILE: limits["files"],
        resource.RLIMIT_CORE: 0,
    }
    if hasattr(resource, "RLIMIT_NPROC"):  # also counts threads, of all processes of this user
        wanted[resource.RLIMIT_NPROC] = limits["threads"]
    for which, most in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (value, value))


def _namespaces(libc: Any, more: int = 0) -> bool:
    """New user, network, IPC, host name and mount namespaces; the process stays who it is."""
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(NEWUSER | NEWNET | NEWIPC | NEWUTS | NEWNS | more):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/self/{name}", os.O_WRONLY)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)
    return True


def _private_files(libc: Any, place: str, size: int, inodes: int) -> bool:
    """A file system in memory at `place`, which only this process sees and which ends with it."""
    options = f"size={size},nr_inodes={inodes},mode=0700".encode()
    return not libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", NOSUID | NODEV | NOEXEC, options)


def readable() -> list[str]:
    """The files and directories that Python and the shared libraries of its modules need."""
    paths = {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], os.path.dirname(os.__file__)}
    paths |= {os.path.join(sys.base_prefix, "lib"), os.path.realpath(sys.executable)}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"}
    paths |= {"/dev/null", "/dev/zero", "/dev/urandom", "/usr/share/zoneinfo"}
    return sorted(path for path in paths if os.path.exists(path))


def startable() -> list[str]:
    """The directories of the system's programs and libraries, and what they need."""
    paths = ("/bin", "/usr/bin", "/lib", "/lib64", "/usr/lib", "/usr/lib64")
    return sorted({os.path.realpath(path) for path in paths if os.path.isdir(path)})


def _landlock(libc: Any, place: str | None, programs: bool) -> bool:
    """Read `readable()`, write in `place`, and do nothing else to any file; no TCP. Source: landlock(7).

    With `programs` the files in `startable()` can be started.
    """
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < (3 if programs else 1):  # programs truncate files by their path, which it knows from 3 on
        return False
    handled = ALL_FILES[max(v for v in ALL_FILES if v <= version)]
    fields = [handled] + ([NETWORK] if version >= 4 else []) + ([SCOPED] if version >= 6 else [])
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    rules = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return False
    if programs:
        devices = ("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo")
        allowed = [(path, NO_WRITES | EXECUTE) for path in startable()] + [(path, NO_WRITES) for path in devices]
        allowed.append(("/dev/null", NO_WRITES | WRITE_FILE | TRUNCATE))
    else:
        allowed = [(path, NO_WRITES) for path in readable()]
    for path, rights in allowed + ([(place, handled & ~EXECUTE)] if place else []):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
            libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights & handled, file), 0)
            os.close(file)
    done = libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)
    return not done


def _seccomp(libc: Any, programs: bool) -> bool:
    """Allow `CALLS`, with `programs` also `PROGRAM_CALLS`; all others fail with EPERM.

    Source: the kernel's userspace-api/seccomp_filter.
    """
    if platform.machine() not in ARCHITECTURES or sys.maxsize < 2**32:
        return False
    column, architecture = ARCHITECTURES[platform.machine()]
    allow, deny, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    load, mask, equal, any_bit, give = 0x20, 0x54, 0x15, 0x45, 0x06

    def step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("=HBBI", code, then, otherwise, value)

    def argument(position: int) -> bytes:
        return step(load, 16 + 8 * position)  # its lower half

    def one_of(number: int | None, position: int, values: tuple[int, ...]) -> bytes:
        """The call `number` is allowed if its argument is one of `values`."""
        body = argument(position)
        body += b"".join(step(equal, value, 0, 1) + step(give, allow) for value in values) + step(give, deny)
        return step(equal, number or 0, 0, len(body) // 8) + body

    def none_of(number: int, position: int, bits: int, values: tuple[int, ...]) -> bytes:
        """The call `number` is allowed unless these bits of its argument are one of `values`."""
        body = argument(position) + step(mask, bits)
        body += b"".join(step(equal, value, 0, 1) + step(give, deny) for value in values) + step(give, allow)
        return step(equal, number, 0, len(body) // 8) + body

    program = step(load, 4) + step(equal, architecture, 1, 0) + step(give, kill) + step(load, 0)
    for number in (row[column] for row in (CALLS | (PROGRAM_CALLS if programs else {})).values()):
        if number is not None:
            program += step(equal, number, 0, 1) + step(give, allow)
    if programs:  # a new process or thread, but no namespace
        thread = argument(0) + step(any_bit, NEW_ANY, 0, 1) + step(give, deny) + step(give, allow)
    else:
        thread = argument(0) + step(any_bit, CLONE_THREAD, 0, 1) + step(give, allow) + step(give, deny)
    program += step(equal, CLONE[column], 0, len(thread) // 8) + thread
    program += step(equal, CLONE3[column], 0, 1) + step(give, 0x00050000 | errno.ENOSYS)  # glibc then uses clone
    for numbers, position in OPENS:
        if (call := numbers[column]) is not None:
            program += none_of(call, position, OPENING, UNASKED)
    program += one_of(IOCTL[column], 1, TERMINAL)
    program += one_of(FCNTL[column], 1, FCNTLS)
    if programs:
        low, high = argument(1), step(load, 16 + 8 + 4)
        null = low + step(equal, 0, 0, 3) + high + step(equal, 0, 0, 1) + step(give, allow) + step(give, deny)
        program += step(equal, UTIMENSAT[column], 0, len(null) // 8) + null
    else:
        program += one_of(TGKILL[column], 0, (os.getpid(),))
    program += one_of(PRLIMIT[column], 0, (0,) if programs else (0, os.getpid()))
    program += step(give, deny)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    return not libc.prctl(SECCOMP, 2, ctypes.byref(Program(len(program) // 8, program)), 0, 0)
