"""Start scripts in a fork of a process that has imported PyTorch: in 0.05 s instead of the 3 s of its imports.

The server is this file, run as a script with a socket as stdin and the modules to import as arguments. For each request
it forks a process that waits for the run and reports its status. That process forks the run itself, which then does
what `python script flags` would.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start_server(environment, modules):
    """The socket for requests. The server has its own session, because Ctrl-C is for pytest, and ends with pytest."""
    ours, theirs = socket.socketpair()
    environment = environment | {"CUDA_VISIBLE_DEVICES": ""}  # a process that has initialized CUDA cannot be forked
    command = [sys.executable, __file__, *modules]
    subprocess.Popen(command, stdin=theirs, env=environment, cwd=ROOT, start_new_session=True)
    return ours


class Run:
    """Like subprocess.Popen, for a script that the server starts. Without a file, stdout is a pipe.

    The pipe holds a page, some thirty lines, so a run never gets far ahead of what the test has read.
    """

    def __init__(self, server, argv, environment, stdout=None, stderr=None, folder=ROOT):
        self.stdout, writing = (stdout, stdout) if stdout else map(os.fdopen, os.pipe(), "rw")
        self.stderr = stderr or tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.returncode = None
        self.socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # one recv for each send
        if writing is not stdout:
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        request = json.dumps([[str(word) for word in argv], environment, str(folder)]).encode() + b"\n"
        socket.send_fds(server, [request], [writing.fileno(), self.stderr.fileno(), theirs.fileno()])
        theirs.close()
        if writing is not stdout:
            writing.close()
        self.pid = int(self.socket.recv(16))

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended; its status is on the way
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def poll(self):
        return self.wait(0.0)

    def wait(self, timeout=None):
        """The exit code, negative after a signal; None if it is still running after `timeout` seconds."""
        if self.returncode is None:
            self.socket.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self.socket.recv(16)))
            except (TimeoutError, BlockingIOError):
                return None
            self.socket.close()
        return self.returncode

    def communicate(self, timeout=300):
        """The output that has not been read yet, and all of stderr."""
        said = self.stdout.read() if self.stdout.readable() else ""
        assert self.wait(timeout) is not None, f"{self.pid} is still running after {timeout} s"
        self.stderr.seek(0)
        return said, self.stderr.read()


def next_run(requests):
    """Fork for each request, and return the script in the fork; never returns in the server itself."""
    while True:
        request, fds, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:
            os.killpg(0, signal.SIGKILL)  # with all that still runs
        while not request.endswith(b"\n"):
            request += requests.recv(1 << 20)
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
        os.waitpid(-1, os.WNOHANG)  # reap an earlier one that has ended
    status = socket.socket(fileno=fds[2])
    if pid := os.fork():
        status.send(b"%d" % pid)
        status.send(b"%d" % os.waitpid(pid, 0)[1])
        os._exit(0)
    requests.close(), status.close()
    for fd, own in ((os.open(os.devnull, os.O_RDONLY), 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(fd, own)
        os.close(fd)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, environment, folder = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = os.path.dirname(sys.argv[0])
    return sys.argv[0]


def leave():
    """Exit with status 0, without freeing what was imported, object by object: that takes 0.3 s."""
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    import atexit
    import gc
    import importlib
    import runpy

    atexit.register(leave)  # before the imports, so that it runs last
    sys.path[0] = str(ROOT)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    sys.modules["matplotlib"] = None  # drawing the losses takes longer than training
    gc.freeze()  # or each run would look for garbage among all that is imported here, 0.8 s at its end alone
    script = next_run(socket.socket(fileno=os.dup(0)))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as end:
        if getattr(end, "code", 1):  # not sys.exit() or sys.exit(0)
            atexit.unregister(leave)
        raise
