"""Processes of jobs, forked from one that has loaded torch already: a tenth of their start's time.

A job's ranks are `forked.py`, which the launcher starts as it would start Python. Each connects to
this server, which forks, gives the child what the launcher gave to that process, and reports its
end. The child is then as Python would be, but that torch is loaded, and nothing of ours.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import psutil
from forked import LENGTH, MOST_FILES, PID

STUB = Path(__file__).with_name("forked.py")
HIGH = 512  # from which files have numbers until they get their own


class Server:
    """The process that forks, on behalf of this one, whose end is its end as well.

    Attributes:
        command: what starts a process in place of Python, before Python's arguments.
    """

    def __init__(self, environment):
        self._folder = tempfile.TemporaryDirectory(prefix="wagma-forks-")
        path = Path(self._folder.name) / "socket"
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._folder.name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout.readline(), "the server of forks did not start"
        self.command = [sys.executable, "-I", "-S", str(STUB), str(path)]
        atexit.register(self.close)

    def environment(self, process: int) -> dict[str, str]:
        """Return the variables of a forked process, or one that it forked; else an empty dict."""
        try:
            told = Path(self._folder.name, str(os.getsid(process))).read_text()
        except OSError:
            return {}
        return json.loads(told)

    def close(self):
        """End the server and the processes that it has forked."""
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def is_stub(process) -> bool:
    """Return whether a process stands for a forked one; one that has ended does not."""
    with contextlib.suppress(psutil.Error):
        return str(STUB) in process.cmdline()
    return False


# In the server


class Child(Exception):
    """Raised in a forked process, which is to be what was requested."""

    def __init__(self, request, files):
        self.request, self.files = request, files


class Forking:
    """The server's loop."""

    def __init__(self, folder):
        self._folder = folder
        self._events = selectors.DefaultSelector()
        self._children = {}  # {connection: pid}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(256)
        self._events.register(self._listener, selectors.EVENT_READ, self._accept)
        self._events.register(sys.stdin, selectors.EVENT_READ, self._end)

    def run(self):
        """Serve until the parent ends; raise `Child` in children."""
        while True:
            for key, _ in self._events.select():
                key.data(key.fileobj)

    def _end(self, _):
        for process in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os._exit(0)

    def _accept(self, listener):
        connection, _ = listener.accept()
        head, files, _, _ = socket.recv_fds(connection, LENGTH.size, MOST_FILES)
        text = b""
        if head:
            (length,) = LENGTH.unpack(head)
            text = connection.recv(length, socket.MSG_WAITALL)
        try:
            request = json.loads(text)
        except ValueError:  # it was killed meanwhile
            connection.close()
        else:
            self._fork(connection, request, files)
        for number in files:
            os.close(number)

    def _fork(self, connection, request, files):
        gate, opened = os.pipe()
        process = os.fork()
        if not process:
            os.close(opened)
            os.read(gate, 1)  # until it can be found by its job
            raise Child(request, files)
        os.close(gate)
        told = self._folder / f"{process}.new"
        told.write_text(json.dumps(request["environment"]))
        told.rename(self._folder / str(process))
        os.close(opened)
        self._children[connection] = process
        self._events.register(connection, selectors.EVENT_READ, self._left)
        ended = os.pidfd_open(process)
        self._events.register(
            ended, selectors.EVENT_READ, functools.partial(self._ended, connection, process)
        )
        with contextlib.suppress(OSError):
            connection.sendall(PID.pack(process))

    def _left(self, connection):
        # What stands for the child was killed.
        if connection in self._children:
            self._events.unregister(connection)
            os.kill(self._children[connection], signal.SIGKILL)

    def _ended(self, connection, process, descriptor):
        self._events.unregister(descriptor)
        os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with contextlib.suppress(KeyError):
            self._events.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(PID.pack(status))
        connection.close()
        del self._children[connection]


# In a child


def become(request, files):
    """Make this process what the launcher has started in place of Python."""
    os.setsid()
    high = [
        (number, fcntl.fcntl(file, fcntl.F_DUPFD, HIGH))
        for number, file in zip(request["files"], files)
    ]
    os.closerange(0, HIGH)
    for number, file in high:
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.sched_setaffinity(0, request["cores"])
    for limit, values in request["limits"].items():
        resource.setrlimit(int(limit), values)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    faulthandler.enable()
    # What C++ destroys at exit takes as long as all else here: a page is copied for each piece.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


def execute(arguments):
    """Run what Python's arguments say: a script, or -m and a module, or -c and code."""
    first, *others = arguments
    places = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [place for place in places if place not in sys.path]
    if first == "-m":
        sys.argv, sys.path[0] = others, os.getcwd()
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *others[1:]], ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def serve(folder):
    """Serve until the parent ends; return in a child what it is to be and its files."""
    forking = Forking(folder)
    print("ready", flush=True)
    try:
        forking.run()
    except Child as child:
        return child.request, child.files


if __name__ == "__main__":
    # Ignored, where a script has started the tests in the background; a launcher restores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("torch")
    gc.freeze()  # so that children copy no page to mark what is on it
    request, files = serve(Path(sys.argv[1]))
    become(request, files)
    execute(request["arguments"])
