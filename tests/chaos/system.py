"""What faults need of the system: a disk that fills, a folder that takes nothing, a network that carries nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.patience import PATIENCE_SECONDS
from tests.training.small_runs import fcp_command

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET
_DETACHED = 2  # MNT_DETACH: what still runs keeps it
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14  # MS_PRIVATE, MS_REC
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE_FL
_DISK_BYTES = 512 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class SkippedError(Exception):
    """This machine, or its user, cannot have a fault."""


def _checked(result: int, what: str) -> None:
    if result:
        raise SkippedError(f"{what}: {os.strerror(ctypes.get_errno())}")


@cache
def own_mounts() -> None:
    """Have what this process mounts seen by itself and its children alone, and gone with them."""
    _checked(_libc.unshare(_NEW_MOUNTS), "mounting needs root")
    _checked(_libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None), "mounts cannot be made private")


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Have a small file system of its own in a folder."""
    own_mounts()
    folder.mkdir()
    options = f"size={_DISK_BYTES}".encode()
    _checked(_libc.mount(b"fcp-chaos", os.fsencode(folder), b"tmpfs", 0, options), "a tmpfs cannot be mounted")
    try:
        yield
    finally:
        _libc.umount2(os.fsencode(folder), _DETACHED)


def fill(path: Path) -> None:
    """Write until nothing more can be written."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass


@contextmanager
def write_protected(folders: Sequence[Path]) -> Iterator[None]:
    """Let nothing be made, renamed or removed in folders, for root neither; files that are open are written on."""
    with ExitStack() as stack:
        for folder in folders:
            stack.callback(_protect(folder))
        yield


def _protect(folder: Path) -> Callable[[], None]:
    mode = folder.stat().st_mode
    if os.geteuid():
        folder.chmod(0o555)
        return lambda: folder.chmod(mode)
    _set_immutable(folder, True)
    return lambda: _set_immutable(folder, False)


def _set_immutable(folder: Path, immutable: bool) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(handle, _GET_FLAGS, struct.pack("l", 0)))
        flags = flags | _IMMUTABLE if immutable else flags & ~_IMMUTABLE
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("l", flags))
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EPERM, errno.EOPNOTSUPP):
            raise SkippedError(f"the file system of {folder} knows no immutable folders") from error
        raise
    finally:
        os.close(handle)


class TwoMachines:
    """Two networks with a cable between them, for the two nodes of a job."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        # Each lives as long as a process in it, which ends with its standard input.
        self._holders = [
            subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        own = Path("/proc/self/ns/net").readlink()
        end = time.monotonic() + PATIENCE_SECONDS
        while any(Path(self._path(node)).readlink() == own for node in range(2)):
            if any(holder.poll() is not None for holder in self._holders) or time.monotonic() > end:
                raise SkippedError("networks of its own need root")
            time.sleep(0.01)
        first, second = (str(holder.pid) for holder in self._holders)
        self._ip("link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable1", "netns", second)
        for node, address in enumerate(self.addresses):
            self._inside(node, "ip", "link", "set", "lo", "up")
            self._inside(node, "ip", "address", "add", f"{address}/24", "dev", f"cable{node}")
            self._inside(node, "ip", "link", "set", f"cable{node}", "up")

    def close(self) -> None:
        for holder in self._holders:
            holder.communicate()

    def entering(self, node: int) -> Callable[[], None]:
        """Return a function that puts the process that calls it onto a machine."""
        path = self._path(node)

        def enter() -> None:
            handle = os.open(path, os.O_RDONLY)
            if _libc.setns(handle, _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
            os.close(handle)

        return enter

    def stall(self) -> None:
        """Let the cable carry nothing more; connections stay."""
        for node in range(2):
            self._inside(node, "tc", "qdisc", "add", "dev", f"cable{node}", "root", "blackhole")

    def unstall(self) -> None:
        for node in range(2):
            self._inside(node, "tc", "qdisc", "del", "dev", f"cable{node}", "root", "blackhole")

    def _path(self, node: int) -> str:
        return f"/proc/{self._holders[node].pid}/ns/net"

    def _inside(self, node: int, *command: str) -> None:
        self._ran("nsenter", f"--net={self._path(node)}", *command)

    def _ip(self, *words: str) -> None:
        self._ran("ip", *words)

    def _ran(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SkippedError(f"{' '.join(command)}: {done.stderr.strip()}")


def own_address() -> str:
    """Return an address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            raise SkippedError("this machine has no network but loopback") from error
        return str(probe.getsockname()[0])


def run_fcp(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `fcp ...` to its end."""
    return subprocess.run(
        fcp_command(*words), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
