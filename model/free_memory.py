"""How much memory is left, on a device and on the machine."""

import re
from pathlib import Path, PurePosixPath

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes that this process could still allocate on `device`; None where PyTorch cannot tell."""
    if device.type == "cpu":
        return free_host_bytes()
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # in the allocator's own pool
    return torch.cuda.mem_get_info(device)[0] + unused


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """The least of the bytes that the machine, this process's control group and each group above it leave free.

    None without /proc. File caches count as free, because the kernel drops them first. Swap does not count. `root`
    holds proc/ and sys/.
    """
    try:
        machine = (root / "proc/meminfo").read_text()
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    free = [int(size) * 1024 for size in re.findall(r"^MemAvailable: +(\d+) kB$", machine, flags=re.M)]
    for membership in memberships:
        _, controllers, group = membership.split(":", 2)  # "0::/a/b" is version 2, "4:memory:/a/b" is version 1
        if controllers in ("", "memory"):
            path = PurePosixPath(group.lstrip("/"))
            # inside a container the path may be the host's; the container's own group is then the uppermost folder
            for folder in (path, *path.parents):
                free += _left_in(root / "sys/fs/cgroup" / controllers / folder)
    return min(free, default=None)


def _left_in(group: Path) -> list[int]:
    """Bytes that the limit of a control group leaves, [] where it has none."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            caches = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", (group / "memory.stat").read_text(), flags=re.M)
        except OSError:
            continue
        if most != "max":
            return [max(0, int(most) - used + sum(map(int, caches)))]
    return []
