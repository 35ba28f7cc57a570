"""Stand for a process that `forks` has forked, towards the launcher that has started this one.

python -I -S tests/forked.py SOCKET ARGUMENTS...

What the launcher gave goes to the server behind the socket: environment, directory, files, limits.
Signals go on to the process, whose end is this one's as well.
"""

import contextlib
import functools
import json
import os
import resource
import select
import signal
import socket
import struct
import sys

FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
LENGTH = struct.Struct("=I")
PID = struct.Struct("=i")
MOST_FILES = 64


def request(arguments, files):
    """Return what a process depends on, as the server takes it."""
    return {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {limit: resource.getrlimit(limit) for limit in LIMITS},
        "files": files,
    }


def open_files():
    """Return the numbers of the files that this process was given."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if os.path.exists(f"/proc/self/fd/{number}")]


def piped(files):
    """Return what is to be read of a pipe, and the files with that in place of a terminal.

    A process that has no launcher among its parents would take Open MPI's for the user's.
    """
    if 1 not in files or not os.isatty(1):
        return None, files
    source, sink = os.pipe()
    return source, [sink if number == 1 else number for number in files]


def copy_until_end(source, server):
    """Copy what comes from a pipe, until the server tells of the end and there is no more."""
    while source is not None:
        ready, _, _ = select.select([source, server], [], [])
        if source not in ready:
            return
        text = os.read(source, 1 << 16)
        if not text:
            return
        while text:
            text = text[os.write(1, text) :]


def forward(process, number, frame):
    """Send a signal on, unless the process has ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def main():
    files = open_files()
    if len(files) > MOST_FILES:
        sys.exit(f"{len(files)} files are open, and a forked process gets at most {MOST_FILES}")
    # One that comes before there is a process is for it, too.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    text = json.dumps(request(sys.argv[2:], files)).encode()
    copied, given = piped(files)
    socket.send_fds(server, [LENGTH.pack(len(text))], given)
    server.sendall(text)
    for number in {*given, *files} - {0, 1, 2}:
        os.close(number)  # whose end the launcher may wait for
    (process,) = PID.unpack(server.recv(PID.size, socket.MSG_WAITALL))

    for number in FORWARDED:
        signal.signal(number, functools.partial(forward, process))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    copy_until_end(copied, server)
    (status,) = PID.unpack(server.recv(PID.size, socket.MSG_WAITALL))
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
