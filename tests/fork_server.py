"""Start scripts in a fork of a process that has imported PyTorch: in 0.05 s, and not in the 3 s of its imports.

The server is this file, run as a script with a socket for its stdin. For each
request it forks a process that waits for the run and reports its status, and from that the run itself, which becomes
what `python script flags` would be: its own environment, arguments, streams, signals, exit code.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class ForkServer:
    def __init__(self, environment):
        self.socket, theirs = socket.socketpair()
        # a session of its own: Ctrl-C is for pytest, which closes the socket when it ends
        environment = environment | {"CUDA_VISIBLE_DEVICES": ""}  # a process that has asked for GPUs cannot be forked
        subprocess.Popen([sys.executable, __file__], stdin=theirs, env=environment, cwd=ROOT, start_new_session=True)
        theirs.close()


class Run:
    """What subprocess.Popen is, for a script that the server starts; without a file, stdout is a pipe."""

    def __init__(self, server: ForkServer, argv, environment, stdout=None, stderr=None):
        self.stdout, self.returncode = stdout, None
        self.stderr = stderr or tempfile.TemporaryFile("w+")  # noqa: SIM115
        writing = stdout
        if stdout is None:
            reading, writing = (os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), "rw", strict=True))
            self.stdout = reading
        self.socket, theirs = socket.socketpair()
        request = json.dumps([[str(word) for word in argv], environment]).encode()
        with tempfile.TemporaryFile() as file:  # longer than a message may be
            file.write(request)
            file.seek(0)
            fds = [file.fileno(), writing.fileno(), self.stderr.fileno(), theirs.fileno()]
            socket.send_fds(server.socket, [b"run"], fds)
            theirs.close()
            if stdout is None:
                writing.close()
            self.pid = int(self.socket.recv(16))

    def send_signal(self, number):
        if self.poll() is None:
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

    def communicate(self, timeout=60):
        """What it has said since, and all that stands in its stderr."""
        said = self.stdout.read() if self.stdout.readable() else ""
        assert self.wait(timeout) is not None, f"{self.pid} is still running after {timeout} s"
        self.stderr.seek(0)
        return said, self.stderr.read()


def next_run(requests):
    """Returns in a fork for each request, with its script; never in the server itself."""
    while True:
        message, fds, *_ = socket.recv_fds(requests, 16, 4)
        if not message:
            os.killpg(0, signal.SIGKILL)  # with what still runs
        if os.fork():
            for fd in fds:
                os.close(fd)
            os.waitpid(-1, os.WNOHANG)  # an earlier one that has ended
            continue
        status = socket.socket(fileno=fds[3])
        with os.fdopen(fds[0]) as file:
            argv, environment = json.load(file)
        if pid := os.fork():
            status.send(b"%d" % pid)
            status.send(b"%d" % os.waitpid(pid, 0)[1])
            os._exit(0)
        for fd, own in ((os.open(os.devnull, os.O_RDONLY), 0), (fds[1], 1), (fds[2], 2)):
            os.dup2(fd, own)
            os.close(fd)
        requests.close(), status.close()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = argv
        sys.path[:1] = [os.path.dirname(argv[0]), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        return argv[0]


if __name__ == "__main__":
    # Not our own modules: runtime/distributed.py reads the environment when it is imported.
    import runpy

    import requests  # noqa: F401
    import tiktoken  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401
    import triton.language  # noqa: F401

    script = next_run(socket.socket(fileno=os.dup(0)))
    runpy.run_path(script, run_name="__main__")
