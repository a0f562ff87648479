"""Which processes of this machine listen at an address, and what they started: by Linux' /proc.

Holds the reading of /proc; it raises nothing, what cannot be read is nobody's. Source: proc(5).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
LISTENS = "0A"
INIT_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h: the machine's own."""
WORD_BYTES = 4


def names_pids_as_the_machine(proc: Path = PROC) -> bool:
    """Whether process ids here are the machine's: in a container others have the same ones."""
    try:
        return str((proc / "self/ns/pid").readlink()) == INIT_PID_NAMESPACE
    except OSError:
        return False


class Processes:
    """The machine's processes at one instant: who listens where, and who started whom."""

    def __init__(self, proc: Path = PROC) -> None:
        self._listening = tuple(_listening(proc))
        inodes = {inode for _, _, inode in self._listening}
        self._by_inode: dict[int, set[int]] = {}
        self._children: dict[int, list[int]] = {}
        for pid in _pids(proc):
            self._children.setdefault(_parent(pid, proc), []).append(pid)
            for inode in inodes.intersection(_sockets_of(pid, proc)):
                self._by_inode.setdefault(inode, set()).add(pid)

    def serving(self, host: str, port: int) -> frozenset[int]:
        """Those that accept what is sent there, and all that they and theirs started, as far as
        the parents live. Who listens at that very address comes before who listens at every one,
        as the kernel has it. Nobody: none that may be seen."""
        at_port = [(address, inode) for address, at, inode in self._listening if at == port]
        exact = {inode for address, inode in at_port if address in _addresses(host)}
        everywhere = {inode for address, inode in at_port if address.is_unspecified}
        found: set[int] = set()
        left = [pid for inode in exact or everywhere for pid in self._by_inode.get(inode, ())]
        while left:
            pid = left.pop()
            if pid not in found:
                found.add(pid)
                left += self._children.get(pid, ())
        return frozenset(found)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _addresses(host: str) -> tuple[Address, ...]:
    if host == "localhost":
        return (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"))
    with contextlib.suppress(ValueError):
        return (_plain(ipaddress.ip_address(host)),)
    return ()


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _listening(proc: Path) -> Iterator[tuple[Address, int, int]]:
    """(local address, port, inode) of each TCP socket that listens."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if len(words) >= 10 and words[3] == LISTENS:
                    address, _, port = words[1].partition(":")
                    yield _address(address), int(port, 16), int(words[9])


def _address(text: str) -> Address:
    """Of hexadecimal words, each in the machine's order of bytes (little-endian wherever there are
    GPUs)."""
    words = bytes.fromhex(text)
    each = (words[at : at + WORD_BYTES][::-1] for at in range(0, len(words), WORD_BYTES))
    return _plain(ipaddress.ip_address(b"".join(each)))


def _pids(proc: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for path in proc.iterdir():
            if path.name.isdecimal():
                yield int(path.name)


_SOCKET = re.compile(r"socket:\[(\d+)\]")


def _sockets_of(pid: int, proc: Path) -> Iterator[int]:
    """Inodes of the process's sockets; none where it is another user's."""
    with contextlib.suppress(OSError):
        for link in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found = _SOCKET.fullmatch(str(link.readlink()))
                if found:
                    yield int(found[1])


def _parent(pid: int, proc: Path) -> int:
    """0 where it is not known. The name before it may hold anything, parentheses too."""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
