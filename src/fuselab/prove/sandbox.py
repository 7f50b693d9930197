"""Keep a process from the rest of the machine, as far as its system allows it.

Landlock (Linux 5.13; the parts used here came with 6.7 and 6.12) takes rights away from a process
for good: it then cannot write outside of its folders, open a TCP connection, or send a signal to,
or trace, a process outside. A user namespace with a network of its own takes all network away.
Limits of resources bound memory and file sizes. Both are asked of the kernel by their system calls,
because no library that is widely kept wraps Landlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_PR_SET_NO_NEW_PRIVS = 38
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
# Writing a file, and removing and making anything.
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # versions 2 and 3
_TCP = 3  # bind and connect, version 4
_SCOPES = 3  # abstract sockets and signals, version 6
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000

SIGNALS = "no signals to processes outside, and no tracing of them"
TRACING = "no tracing of processes outside"
FILES = "no writes outside the scratch folder"
CONNECTIONS = "no TCP connections"
NETWORK = "no network"
MEMORY = "a limit of memory"

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the version of Landlock that the kernel offers, 0 if none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


# What names the folders in which compilers and caches write.
_FOLDERS = (
    "HOME", "TMPDIR", "XDG_CACHE_HOME", "FUSELAB_CACHE", "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
)  # fmt: skip


def shield() -> list[str]:
    """Keep this process from signalling and tracing those outside; return what holds from now."""
    version = landlock_version()
    if version < 6 or not _restrict(version, 0, 0, ()):
        return []
    return [SIGNALS]


def enter(settings: Mapping[str, Any]) -> list[str]:
    """Take from this process what a judged program does not need, and return what holds from now.

    ``settings`` has the ``scratch`` folder, beneath which files may be written, and
    ``memory_bytes``, by which the address space may grow. The process must have one thread.
    """
    holds = []
    scratch = str(settings["scratch"])
    os.environ |= dict.fromkeys(_FOLDERS, scratch)
    _move_temporary_files(scratch)
    if _without_network():
        holds.append(NETWORK)
    version = landlock_version()
    if version:
        files = _WRITES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
        writable = [scratch, "/dev/null", *glob.glob("/dev/nvidia*")]
        if _restrict(version, files, _TCP if version >= 4 else 0, writable):
            holds += [FILES, SIGNALS if version >= 6 else TRACING]
            if version >= 4 and NETWORK not in holds:
                holds.append(CONNECTIONS)
    with contextlib.suppress(OSError, ValueError):
        limit = _address_space_bytes() + int(settings["memory_bytes"])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        holds.append(MEMORY)
    return holds


def _move_temporary_files(scratch: str) -> None:
    """Let modules that were imported before use the scratch folder for their temporary files.

    The code generator of torch.compile keeps precompiled headers in such a folder.
    """
    tempfile.tempdir = None
    inductor: Any = sys.modules.get("torch._inductor.codecache")
    if hasattr(inductor, "_HEADER_DIR"):
        inductor._HEADER_DIR = os.path.join(scratch, "precompiled_headers")
        inductor._HEADER_LOCK_DIR = os.path.join(inductor._HEADER_DIR, "locks")


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _without_network() -> bool:
    """Move this process into namespaces of its own for users and network; return whether it
    moved."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_USER | _NEW_NETWORK) != 0:
        return False
    # Without a mapping the process would be nobody, who may not open the user's files.
    for path, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"{user} {user} 1"),
        ("/proc/self/gid_map", f"{group} {group} 1"),
    ):
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write(text)
    return True


def _restrict(version: int, files: int, network: int, writable: Sequence[str]) -> bool:
    """Restrict this process by Landlock; ``files`` and ``network`` are the rights taken away, but
    for files beneath ``writable``."""
    attributes = struct.pack("<QQQ", files, network, _SCOPES if version >= 6 else 0)
    attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = int(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    if ruleset < 0:
        return False
    try:
        for path in writable:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rights = files if os.path.isdir(path) else files & (_WRITE_FILE | _TRUNCATE)
                rule = struct.pack("<Qi", rights, folder)
                if _libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0) != 0:
                    return False
            finally:
                os.close(folder)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return int(_libc.syscall(_RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)
