"""The hardware of a run: device, number format, TF32, compilation, each choice with its reason."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from kernels.device import failure_of_triton
from training.parallel import ALONE, World

MAX_THREADS = 1024  # more than a machine has cores; a million makes PyTorch hang
TENSOR_CORES = (7, 0)  # Volta's and Turing's multiply float16 but not bfloat16; before them float16 gains nothing
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_FOUND: list[int] = []  # the process's own number of threads, once a run has set another
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class HardwareConfig:
    device: str = "auto"  # auto (CUDA if available, else cpu) | cpu | cuda | cuda:N | mps (a Mac's GPU, never measured)
    dtype: str = "auto"  # of products: auto (the device's fastest) | float32 | bfloat16 | float16; weights are float32
    tf32: bool = True  # faster float32 products: tensor cores, in training on AMD CPUs oneDNN; false: full float32
    compile: bool | None = None  # torch.compile; null: on CUDA only
    cuda_graphs: bool | None = None  # run the training step as CUDA graphs; null: if it can, and memory is ample
    num_threads: int | None = None  # CPU threads of PyTorch; null: PyTorch's own choice

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]*))?", self.device):
            raise ValueError(f"hardware.device={self.device} is not one of auto, cpu, cuda, cuda:N, mps")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"hardware.dtype={self.dtype} is not one of auto, {', '.join(DTYPES)}")
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_THREADS:
            raise ValueError(f"hardware.num_threads={self.num_threads} must be 1 to {MAX_THREADS}, or null")


@dataclass(frozen=True)
class Hardware:
    """The resolved choices. `description` is the sentence the run prints."""

    device: torch.device
    dtype: torch.dtype  # of the forward pass's matrix products
    compile: bool
    description: str
    graphs: bool | None = False  # whether the training step runs as CUDA graphs; None: if memory is ample
    world: World = field(default=ALONE, repr=False, compare=False)  # the processes that each have such a device

    def autocast(self) -> AbstractContextManager:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work; needed before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def peak_memory_gib(self) -> float | None:
        """Most device memory held by tensors at once; None where PyTorch does not count it."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None


def set_up(config: HardwareConfig, world: World = ALONE, *, trains: bool = False) -> Hardware:
    """`choose_hardware` for a program that computes on it: ValueError also where nothing can be compiled.

    trains: whether it takes training steps, whose matrix products have the same few shapes each time.
    """
    hardware = choose_hardware(config, world)
    refuse_without_compiler(hardware)
    if trains and config.tf32 and hardware.device.type == "cpu" and onednn_is_faster():
        torch.set_float32_matmul_precision("medium")
    return hardware


def choose_hardware(config: HardwareConfig, world: World = ALONE) -> Hardware:
    """Resolve `auto` and set PyTorch's global switches; ValueError where a named choice is not available."""
    device = _device(config, world)
    if config.num_threads is not None:
        if not _FOUND:
            _FOUND.append(torch.get_num_threads())
        torch.set_num_threads(config.num_threads)
    elif _FOUND:
        torch.set_num_threads(_FOUND[0])
    if device.type == "cpu":
        keep_freed_memory()
    dtype = _dtype(config.dtype, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # several runs of one process each report their own
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    compiled = config.compile if config.compile is not None else device.type == "cuda"
    graphs = config.cuda_graphs if device.type == "cuda" else False
    return Hardware(device, dtype, compiled, _description(config, device, dtype, compiled, world), graphs, world)


def refuse_without_compiler(hardware: Hardware) -> None:
    """Raise ValueError if nothing can be compiled; the first step would fail with a traceback of PyTorch's.

    On a CPU torch.compile needs a C++ compiler. On a GPU every run needs Triton, and so a C compiler: rotary positions
    and the loss are kernels of ours whatever the attention. Both include Python.h, which a Linux distribution's own
    Python has in a separate package.
    """
    if hardware.device.type == "cuda":
        if failure := failure_of_triton():
            usual = next(filter(shutil.which, ("gcc", "clang")), "gcc")
            why = _why_no_compiler("CC", usual, "c") or f"{failure}; mend that, or use hardware.device=cpu"
            raise ValueError(f"Triton cannot use this GPU: {why}")
    elif hardware.compile and hardware.device.type == "cpu":
        why = _why_no_compiler("CXX", "clang++" if sys.platform == "darwin" else "g++", "c++")
        if why:
            raise ValueError(f"hardware.compile=true, and {why}, or use hardware.compile=false")


def _why_no_compiler(variable: str, usual: str, language: str) -> str | None:
    """Why a file that includes Python.h cannot be compiled, and a remedy; None if it can be preprocessed."""
    name = os.environ.get(variable, usual)  # one word, as for Triton and PyTorch: no arguments, and "" is a name
    command = [name, "-E", "-x", language, f"-I{sysconfig.get_path('include', 'posix_prefix')}", "-"]
    # a framework's Python on macOS has its headers elsewhere, where PyTorch finds them
    source = b"" if sys.platform == "darwin" else b"#include <Python.h>\n"
    headers = f"python3.{sys.version_info[1]}-dev"
    try:
        done = subprocess.run(command, input=source, capture_output=True)
    except OSError:
        install = "xcode-select --install" if sys.platform == "darwin" else f"install {usual} and {headers}"
        remedy = f"unset {variable}" if variable in os.environ else install
        return f"there is no {language.upper()} compiler ({name}); {remedy}"
    return f"{name} finds no Python.h; install {headers}" if done.returncode else None


def _device(config: HardwareConfig, world: World) -> torch.device:
    """The device of this process; a GPU becomes the current one."""
    has_cuda = torch.cuda.is_available()
    if config.device.startswith("cuda") and not has_cuda:
        raise ValueError(f"hardware.device={config.device} but PyTorch sees no CUDA GPU; use hardware.device=cpu")
    if config.device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("hardware.device=mps but PyTorch sees no Apple GPU; use hardware.device=cpu")
    count = torch.cuda.device_count()
    if config.device.startswith("cuda") and gpu_number(config.device) >= count:
        seen = "1 GPU" if count == 1 else f"{count} GPUs"
        raise ValueError(f"hardware.device={config.device} but PyTorch sees {seen}; use hardware.device=cuda")
    device = torch.device("cuda" if config.device == "auto" and has_cuda else config.device.replace("auto", "cpu"))
    if config.cuda_graphs and device.type != "cuda":
        raise ValueError(f"hardware.cuda_graphs=true but hardware.device is {device.type}; leave it out")
    if world.size > 1:
        return _own_device(device, config.device, world)
    if device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are the current GPU's by default
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    has_bf16 = products_dtype(device)[0] == torch.bfloat16
    if name == "auto":
        if device.type == "cuda" and not has_bf16 and torch.cuda.get_device_capability(device) >= TENSOR_CORES:
            return torch.float16
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not has_bf16:
        raise ValueError(
            f"hardware.dtype=bfloat16 but {torch.cuda.get_device_name(device)} has no bfloat16 units; "
            "use hardware.dtype=float16 or float32"
        )
    return DTYPES[name]


def _description(config: HardwareConfig, device: torch.device, dtype: torch.dtype, compiled: bool, world: World) -> str:
    vectors = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512, ...: what speed and roundings differ by
    words = [f"CPU ({vectors}), {torch.get_num_threads()} threads", str(dtype).removeprefix("torch.")]
    if device.type == "mps":
        words[0] = "Apple GPU (mps: as PyTorch has it, never measured here)"
    if dtype == torch.float16:
        words.append("loss scaled")
    if device.type == "cuda":
        words[0] = torch.cuda.get_device_name(device)
        words.append("TF32 on" if config.tf32 else "TF32 off")
    words.append("compiled" if compiled else "eager")
    if world.size > 1:
        words.append(f"{world.size} processes")
    return ", ".join(words)


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory, and serve allocations of up to 32 MiB, its limit, from it.

    By default it returns the end of its heap to the system whenever that is free, and each step frees and allocates the
    same memory: 6,900 page faults in a step of the quickstart, and none with these limits (float32, an AMD EPYC of
    family 26, 2026-11-27). Other C libraries are left alone.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_MMAP_THRESHOLD, 2**25)


def products_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The faster of bfloat16 and float32 for matrix products on `device`, and why.

    A CPU without units for bfloat16 is slower in it than in float32. AVX-512's units are worth using on AMD's cores
    (Zen 4: commit 19b9d6d) but not on Intel's (Sapphire Rapids: commit 4f5e24f), whose fast units are AMX's; a virtual
    machine may hide AMX.
    """
    if device.type == "cuda":
        if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "tensor cores"
        return torch.float32, "this GPU has no bfloat16 units"
    if device.type == "cpu":
        cpu = torch.cpu.get_capabilities()
        if cpu.get("amx_bf16"):
            return torch.bfloat16, "this CPU has amx_bf16"
        if cpu.get("avx512_bf16") and cpu.get("cpu_name", "").startswith("AMD"):
            return torch.bfloat16, "this CPU has avx512_bf16"
    return torch.float32, f"this {device.type.upper()} has no fast bfloat16 units that PyTorch knows"


def onednn_is_faster() -> bool:
    """Whether oneDNN is faster, and no less exact, for this CPU's float32 matrix products of recurring shapes.

    On AMD's cores with AVX-512 it is: it reaches 450 GFLOP/s on two cores of an EPYC of family 26, where MKL, made for
    Intel's, uses AVX2 and reaches 210 (torch 2.11.0, 2026-11-27). PyTorch uses oneDNN at the precision "medium", which
    also allows it to round to bfloat16; it does so only with AMX. Each new shape costs it a millisecond: reading a
    cache that grows by a token at a time was a quarter slower.
    """
    cpu = torch.cpu.get_capabilities()
    return bool(cpu.get("cpu_name", "").startswith("AMD") and cpu.get("avx512_f") and not cpu.get("amx_bf16"))


def gpu_number(device: str) -> int:
    """N of hardware.device=cuda:N, else 0. `torch.device` reads N modulo 256, or cannot parse it."""
    return int(device.partition(":")[2] or 0)


def _own_device(device: torch.device, asked: str, world: World) -> torch.device:
    """The device of one of several processes; a GPU of its own, which becomes the current one."""
    if device.type == "mps":
        raise ValueError(f"hardware.device={asked} is one GPU, for one process and not {world.size}; start one")
    if device.type == "cpu":
        return device
    if asked.startswith("cuda:"):
        raise ValueError(f"hardware.device={asked} is one GPU for {world.size} processes; use hardware.device=cuda")
    count = torch.cuda.device_count()
    index = world.local_rank if count > 1 else 0  # srun may show each task only its own GPU
    if index < count:
        torch.cuda.set_device(index)
    own = f"{world.hosts[world.rank]} {torch.cuda.get_device_properties(index).uuid}" if index < count else None
    owners = world.all_gather(own)
    if own is None or owners.count(own) > 1:
        raise ValueError(
            f"hardware.device={asked}: process {world.local_rank} of {world.hosts[world.rank]}, counted from 0, has no "
            f"GPU of its own among {count}; start one process a GPU"
        )
    return torch.device("cuda", index)
