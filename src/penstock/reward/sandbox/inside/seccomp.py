"""The list of system calls that untrusted code may make, as a BPF program. Inside the sandbox.

An allow list: whatever is not named here fails with EPERM. Arguments are looked at where a call is
harmless only in one form: threads but no processes, signals to itself only, `fcntl` without locks,
leases and notifications (files of the library are shared by all sandboxes), files for reading only when
there is no bounded scratch. Contents of memory cannot be looked at, so calls
that take their arguments in a struct (clone3, openat2) do not exist here.
"""

from __future__ import annotations

import errno
import functools
import struct

from penstock.reward.sandbox.inside import kernel

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_AF_UNIX = 1
_ANY_PID = 0x7FABCDEF  # in a template: no process has such a number
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY | O_RDWR | O_CREAT | O_TRUNC

Table = dict[str, tuple[int | None, int | None]]  # name -> numbers on x86_64, aarch64

# fmt: off
ALWAYS: Table = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215),
    "brk": (12, 214), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, None), "lstat": (6, None),
    "statx": (332, 291), "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436),
    "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "getdents64": (217, 61), "readlink": (89, None),
    "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "statfs": (137, 43), "fstatfs": (138, 44), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "membarrier": (324, 283),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102), "restart_syscall": (219, 128), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "set_tid_address": (218, 96), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "arch_prctl": (158, None),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "getpgid": (121, 155),
    "getpgrp": (111, None), "getsid": (124, 156), "exit": (60, 93), "exit_group": (231, 94),
    "wait4": (61, 260), "waitid": (247, 95), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153), "getrusage": (98, 165), "getrandom": (318, 278),
    "uname": (63, 160), "umask": (95, 166), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getcpu": (309, 168), "recvfrom": (45, 207), "recvmsg": (47, 212),
    "shutdown": (48, 210), "sendfile": (40, 71),
}
WITH_SCRATCH: Table = {
    "open": (2, None), "openat": (257, 56), "creat": (85, None), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "truncate": (76, 45),
    "ftruncate": (77, 46), "fallocate": (285, 47), "symlink": (88, None), "symlinkat": (266, 36),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88),
    "utimes": (235, None), "utime": (132, None), "fsync": (74, 82), "fdatasync": (75, 83),
    "copy_file_range": (326, 285),
}
CONDITIONAL: Table = {
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "kill": (62, 129),
    "tgkill": (234, 131), "prlimit64": (302, 261), "prctl": (157, 167), "fcntl": (72, 25),
    "ioctl": (16, 29), "socketpair": (53, 199), "sendto": (44, 206),
}
ABSENT: Table = {"clone3": (435, 435), "openat2": (437, 437)}  # ENOSYS: libc takes the older call
# fmt: on

# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: nothing that another process can see
_FCNTLS = (0, 1, 2, 3, 4, 1030)
# tty questions, FIONREAD, FIONBIO, cloexec
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _argument(index: int, high: bool = False) -> bytes:
    return _op(_LOAD, _ARGUMENTS_AT + 8 * index + 4 * high)


def _equals_one_of(index: int, values: tuple[int, ...]) -> bytes:
    tests = b"".join(_op(_JUMP_EQUAL, v, len(values) - i) for i, v in enumerate(values))
    return _argument(index) + tests + _fail(errno.EPERM) + _op(_RETURN, _ALLOW)


def _masked(index: int, mask: int, value: int, otherwise: int) -> bytes:
    head = _argument(index) + _op(_AND, mask) + _op(_JUMP_EQUAL, value, 1)
    return head + _fail(otherwise) + _op(_RETURN, _ALLOW)


def build_filter(arch: str, pid: int, *, scratch: bool = True, threads: bool = True) -> bytes:
    """The filter for process `pid`; `scratch` says that it has a bounded folder to write in."""
    template = _template(arch, scratch, threads)
    return template.replace(struct.pack("I", _ANY_PID), struct.pack("I", pid))


@functools.cache
def _template(arch: str, scratch: bool, threads: bool) -> bytes:
    column = 0 if arch == "x86_64" else 1
    program = _op(_LOAD, _ARCH_AT) + _op(_JUMP_EQUAL, _AUDIT[arch], 1) + _op(_RETURN, _KILL)
    program += _op(_LOAD, _NUMBER_AT)
    allowed = ALWAYS | (WITH_SCRATCH if scratch else {})
    blocks = [(numbers[column], _op(_RETURN, _ALLOW)) for numbers in allowed.values()]
    low = _argument(4) + _op(_JUMP_EQUAL, 0, 0, 2)
    high = _argument(4, high=True) + _op(_JUMP_EQUAL, 0, 1)
    conditions = {
        "kill": _equals_one_of(0, (_ANY_PID,)),
        "tgkill": _equals_one_of(0, (_ANY_PID,)),
        "prlimit64": _equals_one_of(0, (0, _ANY_PID)),
        "prctl": _equals_one_of(0, (kernel.PR_SET_NAME, kernel.PR_GET_NAME)),
        "fcntl": _equals_one_of(1, _FCNTLS),
        "ioctl": _equals_one_of(1, _IOCTLS),
        "socketpair": _equals_one_of(0, (_AF_UNIX,)),
        "sendto": low + high + _fail(errno.EPERM) + _op(_RETURN, _ALLOW),  # without an address
    }
    if threads:
        conditions["clone"] = _masked(0, kernel.CLONE_THREAD, kernel.CLONE_THREAD, errno.EPERM)
    if not scratch:
        conditions["open"] = _masked(1, _WRITING, 0, errno.EROFS)
        conditions["openat"] = _masked(2, _WRITING, 0, errno.EROFS)
    blocks += [(CONDITIONAL[name][column], block) for name, block in conditions.items()]
    blocks += [(numbers[column], _fail(errno.ENOSYS)) for numbers in ABSENT.values()]
    for number, block in blocks:
        if number is not None:
            program += _op(_JUMP_EQUAL, number, 0, len(block) // 8) + block
    return program + _fail(errno.EPERM)
