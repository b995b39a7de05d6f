"""Keys of encrypted cells from a command, such as a client of a key management service.

It runs once, without a shell, in a session of its own that ends with it. What it prints stays in
memory: nothing of it is logged or in an error.
"""

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time

from vllm_kvpool.errors import ConfigError

TIMEOUT_S = 30.0
MAX_PRINTED_BYTES = 64 << 10
MAX_SHOWN_CHARS = 200  # of its first line on standard error


def printed_by(command: str) -> bytes:
    """What a command prints to standard output; ConfigError if it fails or takes `TIMEOUT_S`.

    Blocks. Errors name the program alone, since arguments may be secret.
    """
    words = shlex.split(command)
    where = f"encryption_key_command {words[0]}"
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{where} cannot be run: {error.strerror}") from None
    try:
        output, errors = _read_both(process, where)
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _took_too_long(where) from None
    finally:
        _end(process)
    if status:
        what = f"exit status {status}" if status > 0 else f"signal {-status}"
        first = errors.decode(errors="replace").strip().partition("\n")[0][:MAX_SHOWN_CHARS]
        raise ConfigError(f"{where} ended with {what}: {first or 'nothing on standard error'}")
    return output


def _read_both(process: "subprocess.Popen[bytes]", where: str) -> tuple[bytes, bytes]:
    """Standard output and standard error until both have ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + TIMEOUT_S
    read = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as waiting:
        for descriptor in read:
            waiting.register(descriptor, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _took_too_long(where)
            for each, _ in ready:
                part = os.read(each.fd, MAX_PRINTED_BYTES)
                if not part:
                    waiting.unregister(each.fd)
                read[each.fd] += part
                if len(read[each.fd]) > MAX_PRINTED_BYTES:
                    raise ConfigError(f"{where} prints more than {MAX_PRINTED_BYTES} bytes")
    output, errors = read.values()
    return bytes(output), bytes(errors)


def _took_too_long(where: str) -> ConfigError:
    return ConfigError(f"{where} has not ended after {TIMEOUT_S:g} s and was killed")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of its session, and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
