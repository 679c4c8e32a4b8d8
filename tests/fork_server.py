"""`python` for tests that start many: a server imports once what our programs import, and forks each of them.

`stand_in(FOLDER)` is the path of a program that takes the arguments of `python` (a script, `-m MODULE`, `-c CODE`) and
has them run in the caller's folder, with its environment, its three standard files, its signals and its exit code. What
differs: modules are already imported, so what a module reads of the environment at its import is the server's. All
processes of the suite share one server, which ends when pytest does.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent

# what stands in for `python`: it has a process forked, passes signals on, and ends as that one does
CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
passed_on = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until there is somebody to pass them on to
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"3"], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
server.shutdown(socket.SHUT_WR)
answers = server.makefile()
child = int(answers.readline())
for number in passed_on:
    signal.signal(number, lambda number, frame: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def stand_in(folder: Path) -> Path:
    """What to call in place of `python`; the first to ask for it in this folder starts the server."""
    if sys.platform != "linux":  # PyTorch cannot be forked everywhere
        return Path(sys.executable)
    folder.mkdir(exist_ok=True)
    client = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not client.exists():
            pytest = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
            with (folder / "server.err").open("w") as errors:
                server = subprocess.Popen(
                    [sys.executable, "-m", "tests.fork_server", str(folder / "socket"), str(pytest)],
                    cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                    # looks for GPUs, and can fork; and logs as train.py lets PyTorch log where processes run together
                    env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                )  # fmt: skip
            assert server.stdout.readline(), (folder / "server.err").read_text()
            server.stdout.close()
            server.returncode = 0  # it is nobody's to wait for
            client.write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket")))
            client.chmod(0o755)
    return client


def serve(address: str, pytest: int) -> None:
    """Fork for whoever asks, until `pytest` ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in a script's background
    import torch
    import torch._dynamo  # these four when a run first needs them, which takes longer than the run
    import torch._inductor.compile_fx
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import train  # noqa: F401
    from tests import runs  # noqa: F401
    from training import curves

    if os.environ.get("TRITON_INTERPRET") == "1":  # tests/conftest.py has set it
        from tests import interpreter  # imports Triton

        interpreter.make_quick()
    torch.set_num_threads(1)  # a forked child cannot use its parent's threads
    curves.draw_run = lambda run, path: None
    gc.collect()
    gc.freeze()  # or a child's collector would write to all memory, and so copy it
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        print("ready", flush=True)
        os.dup2(2, 1)
        ended = os.pidfd_open(pytest)
        while ended not in select.select([listening, ended], [], [])[0]:
            asked, _ = listening.accept()
            if not os.fork():
                listening.close()
                os.close(ended)
                answer(asked)
            asked.close()
            with contextlib.suppress(ChildProcessError):  # those that are done
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def answer(asked: socket.socket) -> NoReturn:
    """Fork what is asked for, say its number and how it ended; it is killed when whoever asked is gone."""
    _, files, _, _ = socket.recv_fds(asked, 1, 3)
    with asked.makefile() as words:
        request = json.load(words)
    child = os.fork()
    if not child:
        asked.close()
        become(files, *request)
    for file in files:
        os.close(file)
    asked.sendall(f"{child}\n".encode())
    died, gone = os.pidfd_open(child), select.poll()
    gone.register(died, select.POLLIN)
    gone.register(asked, select.POLLHUP)
    if died not in dict(gone.poll()):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        asked.sendall(f"{code}\n".encode())
    os._exit(0)


def become(files: list[int], arguments: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Run `python ARGUMENTS`, and end as the interpreter would."""
    code: Any = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        line_by_line = bool(environment.get("PYTHONUNBUFFERED"))
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = open(number, "w", closefd=False, buffering=1 if line_by_line or number == 2 else -1)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        match arguments:
            case ["-m", module, *given]:
                sys.argv = [module, *given]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", source, *given]:
                sys.argv = ["-c", *given]
                exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
            case [script, *given]:
                sys.argv = [script, *given]
                runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
