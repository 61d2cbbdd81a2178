"""Attempts to break out of the sandbox. Each prints ESCAPED if, and only if, it got what it wanted.

Names in braces are filled in by the test: a port that listens on the host, the host's pid, a secret file
of the host, the name and value of a secret in its environment, and a folder of the host.
"""

from __future__ import annotations

_RAW = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    return libc.syscall(number, *args)
"""

_MACHINE_CODE = """
import mmap, struct
def run(number, *args):
    # push rbx; mov ebx, ecx, edx and eax; int 0x80; pop rbx; ret
    loads = b''.join(bytes([code]) + struct.pack('<I', word) for code, word in zip(b'\\xbb\\xb9\\xba\\xb8', (*args, number)))
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b'\\x53' + loads + b'\\xcd\\x80\\x5b\\xc3')
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""

ATTEMPTS: dict[str, str] = {
    # network
    "tcp connect": "import socket\ns = socket.create_connection(('127.0.0.1', {port}), 1)\nprint('ESCAPED')",
    "udp send": "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', {port}))\nprint('ESCAPED')",
    "raw socket": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nprint('ESCAPED')",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)\nprint('ESCAPED')",
    "netlink socket": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nprint('ESCAPED')",
    "listening": "import socket\ns = socket.socket()\ns.bind(('', 0))\ns.listen()\nprint('ESCAPED')",
    "socket by system call": _RAW + "if call({nr_socket}, 2, 1, 0) >= 0: print('ESCAPED')",
    "datagram pair to another socket": "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.sendto(b'x', '/dev/log')\nprint('ESCAPED')",
    "io_uring": _RAW
    + "buffer = ctypes.create_string_buffer(256)\nif call(425, 8, buffer) >= 0: print('ESCAPED')",
    "urllib": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)\nprint('ESCAPED')",
    # processes
    "fork": "import os\nif os.fork() >= 0: print('ESCAPED')",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n        print('ESCAPED', flush=True)\n    except OSError: pass",
    "vfork and exec": "import subprocess\nsubprocess.run(['/bin/true'])\nprint('ESCAPED')",
    "posix_spawn": "import os\nos.posix_spawn('/bin/true', ['true'], dict())\nprint('ESCAPED')",
    "os.system": "import os\nif os.system('true') == 0: print('ESCAPED')",
    "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "exec the interpreter": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])",
    "multiprocessing": "import multiprocessing\np = multiprocessing.Process(target=print)\np.start()\nprint('ESCAPED')",
    "clone by system call": _RAW
    + "pid = call({nr_clone}, 17, 0, 0, 0, 0)\nif pid >= 0: print('ESCAPED')",
    "clone3 by system call": _RAW
    + "args = ctypes.create_string_buffer(88)\nif call(435, args, 88) >= 0: print('ESCAPED')",
    # the other tables of system calls that an x86_64 kernel has: of 32-bit code, and x32
    "a system call of 32-bit code": _RAW
    + _MACHINE_CODE
    + "if os.uname().machine == 'x86_64' and run(359, 1, 1, 0) >= 0: print('ESCAPED')",
    "a process by 32-bit code": _RAW
    + _MACHINE_CODE
    + "if os.uname().machine == 'x86_64' and run(2, 0, 0, 0) >= 0: print('ESCAPED', flush=True)",
    "a system call by its x32 number": _RAW
    + "if call(1 << 30 | {nr_socket}, 2, 1, 0) >= 0: print('ESCAPED')",
    "an allowed call by its x32 number": _RAW
    + "if call(1 << 30 | {nr_getpid}) >= 0: print('ESCAPED')",
    "double-fork daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        print('ESCAPED', flush=True)\n        time.sleep(600)",
    "thread bomb": "import threading, time\nthreading.stack_size(65536)\nstarted = 0\ntry:\n    while started < 2000:\n        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n        started += 1\nexcept RuntimeError: pass\nif started >= 2000: print('ESCAPED')",
    # a better place for the processor
    "another scheduling class": "import os\nfor policy in (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE, os.SCHED_FIFO):\n    try: os.sched_setscheduler(0, policy, os.sched_param(int(policy == os.SCHED_FIFO)))\n    except OSError: continue\n    print('ESCAPED')",
    "a scheduling class by system call": _RAW
    + "import struct\nattributes = ctypes.create_string_buffer(struct.pack('IIQiIQQQ', 48, 0, 0, 0, 0, 0, 0, 0), 48)\nif call({nr_sched_setattr}, 0, attributes, 0) >= 0: print('ESCAPED')",
    "another niceness": "import os\nfor act in (lambda: os.nice(0), lambda: os.nice(1), lambda: os.setpriority(os.PRIO_PROCESS, 0, 0), lambda: os.setpriority(os.PRIO_USER, 0, 19)):\n    try: act()\n    except OSError: continue\n    print('ESCAPED')",
    "another processor": "import os\nos.sched_setaffinity(0, os.sched_getaffinity(0))\nprint('ESCAPED')",
    # memory, time, output, disk
    "memory bomb": "x = bytearray(64 << 30)\nprint('ESCAPED')",
    "memory bit by bit": "x = []\nfor i in range(8192): x.append(bytearray(1 << 20))\nprint('ESCAPED')",
    "memory by anonymous files": "import os\nfor i in range(100):\n    fd = os.memfd_create('x')\n    os.ftruncate(fd, 1 << 30)\n    os.posix_fallocate(fd, 0, 1 << 26)\nprint('ESCAPED')",
    "locked memory": _RAW + "if libc.mlockall(3) == 0: print('ESCAPED')",
    "shared memory": "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=1 << 30)\nprint('ESCAPED')",
    "disk fill": "with open('big', 'wb') as f:\n    for i in range(1024):\n        f.write(bytes(1 << 20))\n        f.flush()\nprint('ESCAPED')",
    "disk fill by many files": "for i in range(200):\n    with open(f'f{{i}}', 'wb') as f: f.write(bytes(1 << 20))\nprint('ESCAPED')",
    "file count": "for i in range(100_000): open(f'f{{i}}', 'w').close()\nprint('ESCAPED')",
    "folder depth": "import os\nfor i in range(100_000):\n    os.mkdir('d')\n    os.chdir('d')\nprint('ESCAPED')",
    "sparse file": "import os\nfd = os.open('sparse', os.O_RDWR | os.O_CREAT)\nos.ftruncate(fd, 1 << 40)\nprint('ESCAPED')",
    "open files": "import os\nfds = [os.dup(0) for _ in range(10_000)]\nprint('ESCAPED')",
    "huge output": "import sys\nwhile True: sys.stdout.write('x' * 1_000_000)",
    "huge errors": "import sys\nwhile True: sys.stderr.write('x' * 1_000_000)",
    "huge report": "import os\nwhile True: os.write(3, b'x' * 1_000_000)",
    "sleeping past the limit": "import time\ntime.sleep(600)\nprint('ESCAPED')",
    "spinning": "while True: pass",
    "spinning in C": "sum(range(10 ** 12))\nprint('ESCAPED')",
    "ignoring signals": "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "raising its own limits": "import resource\nfor name in ('RLIMIT_CPU', 'RLIMIT_AS', 'RLIMIT_NOFILE'):\n    kind = getattr(resource, name)\n    resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)\n    print('ESCAPED')",
    "another's limits": "import resource\nresource.prlimit({host_pid}, resource.RLIMIT_NOFILE, (3, 3))\nprint('ESCAPED')",
    # files
    "shadow": "open('/etc/shadow').read()\nprint('ESCAPED')",
    "passwd": "open('/etc/passwd').read()\nprint('ESCAPED')",
    "the host's secret file": "open({secret_file!r}).read()\nprint('ESCAPED')",
    "symbolic link to a secret": "import os\nos.symlink({secret_file!r}, 'link')\nprint('ESCAPED' if open('link').read() else '')",
    "symbolic link to root": "import os\nos.symlink('/', 'root')\nprint('ESCAPED' if os.path.exists('root/etc/passwd') and open('root/etc/passwd') else '')",
    "hard link": "import os\nos.link('/etc/passwd', 'link')\nprint('ESCAPED')",
    "climbing out": "import os\nos.chdir('../../../../../..')\nopen('etc/passwd').read()\nprint('ESCAPED')",
    "openat2": _RAW
    + "how = (ctypes.c_uint64 * 3)(0, 0, 0)\nif call(437, -100, b'/etc/passwd', how, 24) >= 0: print('ESCAPED')",
    "listing home": "import os\nif os.listdir({folder!r}): print('ESCAPED')",
    "writing outside": "open({folder!r} + '/escaped', 'w').write('x')\nprint('ESCAPED')",
    "writing to the library": "import os\nopen(os.path.dirname(os.__file__) + '/escaped.py', 'w')\nprint('ESCAPED')",
    "deleting the library": "import os\nos.unlink(os.__file__)\nprint('ESCAPED')",
    "deleting its own files": "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nshutil.rmtree('/', ignore_errors=True)",
    "device node": "import os, stat\nos.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))\nprint('ESCAPED')",
    "kernel memory": "open('/dev/mem', 'rb').read(1)\nprint('ESCAPED')",
    "set-uid file": "import os\nopen('x', 'w').close()\nos.chmod('x', 0o4755)\nos.chown('x', 0, 0)\nprint('ESCAPED')",
    "an installed package": "import os\nlib = os.path.dirname(os.__file__)\nfor top in (lib, '/usr/lib/python3', '/usr/local/lib', '/usr/lib'):\n    for folder, _, files in os.walk(top):\n        for name in files if '-packages' in folder else ():\n            try:\n                if open(os.path.join(folder, name), 'rb').read(1): print('ESCAPED', flush=True)\n            except OSError: pass",
    "import from the base interpreter": "import os, sys\nsys.path.append(os.path.join(os.path.dirname(os.__file__), 'site-packages'))\nimport pip\nprint('ESCAPED')",
    # files and folders that all sandboxes share
    "flock": "import fcntl, os\nfcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)\nprint('ESCAPED')",
    "record lock": "import fcntl, os\nfcntl.lockf(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_SH)\nprint('ESCAPED')",
    "looking for record locks": "import fcntl, os, struct\nfcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_GETLK, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))\nprint('ESCAPED')",
    "open-file lock": "import fcntl, os, struct\nfcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))\nprint('ESCAPED')",
    "lease": "import fcntl, os\nfcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 0)\nprint('ESCAPED')",
    "directory notification": "import fcntl, os\nfcntl.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), 1026, 1 | 1 << 31)\nprint('ESCAPED')",
    "inotify": _RAW
    + "fd = libc.inotify_init()\nif fd >= 0 and libc.inotify_add_watch(fd, os.__file__.encode(), 1) >= 0: print('ESCAPED')",
    "the time of a device": "import os\nos.utime('/dev/null')\nprint('ESCAPED')",
    "the time of the library": "import os\nos.utime(os.__file__)\nprint('ESCAPED')",
    "the machine's free memory": _RAW
    + "if libc.sysinfo(ctypes.create_string_buffer(256)) == 0: print('ESCAPED')",
    "the size of pipes": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 1031, 1 << 20)\nprint('ESCAPED')",
    # others' processes and secrets
    "environment": "import os\nprint('ESCAPED' if {secret_name!r} in os.environ or os.environ else '')",
    "the host's environment": "print('ESCAPED' if open('/proc/{host_pid}/environ').read() else '')",
    "the parent's environment": "import os\nprint('ESCAPED' if open(f'/proc/{{os.getppid()}}/environ').read() else '')",
    "processes of others": "import os\nprint('ESCAPED' if [p for p in os.listdir('/proc') if p.isdigit()] else '')",
    "the parent's memory": "import os\nopen(f'/proc/{{os.getppid()}}/mem', 'rb')\nprint('ESCAPED')",
    "secret in memory": "import gc\nprint('ESCAPED' if any({secret_half!r} + 'er' in o for o in gc.get_objects() if isinstance(o, (str, dict))) else '')",
    "ptrace": _RAW + "if call({nr_ptrace}, 16, os.getppid(), 0, 0) == 0: print('ESCAPED')",
    "process_vm_readv": _RAW
    + "buf = ctypes.create_string_buffer(16)\nvec = (ctypes.c_uint64 * 2)(ctypes.addressof(buf), 16)\nif call({nr_vm_read}, os.getppid(), vec, 1, vec, 1, 0) > 0: print('ESCAPED')",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\nprint('ESCAPED')",
    "kill the host": "import os\nos.kill({host_pid}, 0)\nprint('ESCAPED')",
    "kill everyone": "import os\nos.kill(-1, 9)\nprint('ESCAPED')",
    "kill the group": "import os\nos.killpg(0, 9)\nprint('ESCAPED')",
    "signals by pidfd": "import os, signal\nfd = os.pidfd_open(os.getppid())\nsignal.pidfd_send_signal(fd, 9)\nprint('ESCAPED')",
    "signals by file owner": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())\nprint('ESCAPED')",
    # privileges
    "root": "import os\nos.setuid(0)\nprint('ESCAPED')",
    "user namespace": _RAW + "if libc.unshare(0x10000000) == 0: print('ESCAPED')",
    "mount": _RAW + "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('ESCAPED')",
    "chroot": "import os\nos.chroot('/')\nprint('ESCAPED')",
    "host name": "import socket\nsocket.sethostname('x')\nprint('ESCAPED')",
    "the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nprint('ESCAPED')",
    "kernel modules": _RAW + "if call({nr_init_module}, 0, 0, b'') == 0: print('ESCAPED')",
    "bpf": _RAW
    + "if call({nr_bpf}, 5, ctypes.create_string_buffer(128), 128) >= 0: print('ESCAPED')",
    "tracing": _RAW
    + "attr = ctypes.create_string_buffer(128)\nif call({nr_perf}, attr, 0, -1, -1, 0) >= 0: print('ESCAPED')",
    "keyring": _RAW + "if call({nr_keyctl}, 0, -3, 1) >= 0: print('ESCAPED')",
    "userfaultfd": _RAW + "if call({nr_userfaultfd}, 0) >= 0: print('ESCAPED')",
    "leaving the filter": _RAW
    + "if libc.prctl(22, 0) == 0 or libc.prctl(38, 0, 0, 0, 0) == 0: print('ESCAPED')",
    # the interpreter itself
    "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return repr(f(x + 1))\nf(0)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "null bytes": "\x00print('ESCAPED')",
    "unicode": "ｐｒｉｎｔ('ESC' 'APE')\nprint('\ud800\udfff')",
    "deep source": "x = " + "(" * 100_000,
    "closing everything": "import os\nos.closerange(0, 100)\nprint('x')",
    "inherited descriptors": "import os\nprint('ESCAPED' if [n for n in range(4, 256) if not _closed(n)] else '')\n".replace(
        "import os\n",
        "import os\ndef _closed(n):\n    try: os.fstat(n)\n    except OSError: return True\n",
    ),
}

NUMBERS = {
    "x86_64": {
        "nr_socket": 41, "nr_clone": 56, "nr_ptrace": 101, "nr_vm_read": 310, "nr_init_module": 175,
        "nr_bpf": 321, "nr_perf": 298, "nr_keyctl": 250, "nr_userfaultfd": 323, "nr_sched_setattr": 314,
        "nr_getpid": 39,
    },
    "aarch64": {
        "nr_socket": 198, "nr_clone": 220, "nr_ptrace": 117, "nr_vm_read": 270, "nr_init_module": 105,
        "nr_bpf": 280, "nr_perf": 241, "nr_keyctl": 219, "nr_userfaultfd": 282, "nr_sched_setattr": 274,
        "nr_getpid": 172,
    },
}  # fmt: skip
