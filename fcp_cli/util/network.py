"""Network of this machine: interfaces, routes to other nodes, ports."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import re
import socket
import struct
from contextlib import suppress

# A host name or address, optionally with brackets or a zone, but nothing that looks like an option.
_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_LAST_PORT = 65535
_PROBE_PORT = 9  # nothing is sent: connecting a datagram socket only picks a route


def interfaces() -> tuple[str, ...]:
    """Return the names of network interfaces, including loopback."""
    with suppress(OSError):
        return tuple(name for _, name in socket.if_nameindex())
    return ()


def is_host(text: str) -> bool:
    """Return whether a text is a valid host name or address."""
    return _HOST.fullmatch(text) is not None


def addresses_of(host: str) -> tuple[str, ...]:
    """Resolve a host name to addresses; () if it cannot be resolved."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    return ()


def is_loopback(address: str) -> bool:
    """Return whether a text is a loopback IP address; a name, even `localhost`, is not."""
    with suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def interface_towards(host: str) -> str | None:
    """Return the interface of the route to a host; None if there is no route or it is unknown."""
    local = _local_address_towards(host)
    if local is None or is_loopback(local):
        return None
    return next((name for name in interfaces() if _ipv4_of(name) == local), None)


def is_here(host: str) -> bool:
    """Return whether a host name refers to this machine: whether its address can be bound."""
    return any(_can_bind(address) for address in addresses_of(host))


def way_problem(host: str, port: int, *, seconds: float) -> str:
    """Return the reason why a host is unreachable, or ""; a closed port counts as reachable."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except ConnectionRefusedError:
        return ""
    except TimeoutError:
        return f"it did not answer within {seconds:.0f} s"
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error).lower()
    return ""


def listens(host: str, port: int, *, seconds: float) -> bool:
    """Return whether a port of a host accepts connections."""
    with suppress(OSError, UnicodeError):
        socket.create_connection((host, port), timeout=seconds).close()
        return True
    return False


def resolution_problem(name: str) -> str:
    """Return the reason why a host name does not resolve; "" if it does or is empty."""
    if name:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            return str(error.strerror or error)
    return ""


def port_problem(port: int) -> str:
    """Return the reason why this machine cannot listen on a port, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Like torch's store, ignore lingering (TIME_WAIT) connections of an ended job.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return "in use by another process" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def free_ports(first: int, count: int) -> int:
    """Return the start of `count` consecutive unused ports from `first` on, or `first` if there are none."""
    for port in range(first, _LAST_PORT - count):
        if all(_is_unused(port + i) for i in range(count)):
            return port
    return first


def _is_unused(port: int) -> bool:
    """Return whether a port is unused, even by lingering connections, for which MindSpore waits 30 s."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", port))
        return True
    return False


def _local_address_towards(host: str) -> str | None:
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _PROBE_PORT))
        return str(probe.getsockname()[0])
    return None


def _ipv4_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False
