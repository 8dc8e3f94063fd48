"""What the machine has: memory of accelerator and host."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import psutil

_UNITS = {"": 1, "k": 1000} | {
    prefix + i: (1024 if i else 1000) ** power for power, prefix in enumerate("KMGTP", 1) for i in ("", "i")
}
_GROUPS = (  # limit, usage, statistics; of version 2 and 1 of Linux's control groups
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def parse_amount(given: str | int | float, where: str, unit: str = "B", example: str = "16GiB or 500MB") -> float:
    """A positive number, or text with a prefix and a unit.

    Args:
      given: The number or text.
      where: It was given, for the error.
      unit: That it may have.
      example: Of what would have been right there, for the error.

    Example:
      >>> parse_amount("16GiB", "here"), parse_amount("1.5 MB", "here"), parse_amount("50GB/s", "here", "B/s")
      (17179869184.0, 1500000.0, 50000000000.0)
    """
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kKMGTP]?i?)(?:{unit})?\s*", str(given))
    if not match or match[2] not in _UNITS or not 0 < float(match[1]) < float("inf"):
        raise ValueError(f"{where}: expected {'bytes' if unit == 'B' else unit}, as in {example}; got {given!r}.")
    return float(match[1]) * _UNITS[match[2]]


def memory_bytes(given: str | int, where: str) -> int:
    """Bytes from a number, text with a unit, or "device" for the accelerator's own limit.

    Example:
      >>> memory_bytes("16GiB", "here"), memory_bytes(4096, "here")
      (17179869184, 4096)
    """
    if given != "device":
        return int(parse_amount(given, where, example="16GiB or 500MB, or 'device'"))
    limit = device_limit()
    if limit is None:
        raise ValueError(f"{where}: {jax.devices()[0]} does not tell how much it has; give bytes.")
    return limit


def device_limit() -> int | None:
    """Bytes that the accelerator lets a process have, if it tells."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def host_available() -> int:
    """Bytes of host memory that this process may still take: free ones, within the limit of its control group."""
    available = psutil.virtual_memory().available
    for limit, usage, statistics in _GROUPS:
        try:
            room = int(Path(limit).read_text()) - int(Path(usage).read_text())
            pages = re.search(r"^(?:total_)?inactive_file (\d+)$", Path(statistics).read_text(), re.MULTILINE)
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
        return min(available, room + (int(pages[1]) if pages else 0))  # pages of files make room when it is needed
    return available
