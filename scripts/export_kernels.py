"""The kernels as a folder that Hugging Face's `kernels` loads: `python -m scripts.export_kernels folder=FOLDER`.

It holds build/torch-cuda/, a copy of kernels/ that also exports FlashAttention's two functions, and metadata.json. Use
it in a project that does not have our folder kernels/ on its path, directly or in a model of transformers:

    attention = kernels.get_local_kernel(Path("FOLDER"))  # attention.flash_attn_func(q, k, v, causal=True)

    os.environ["LOCAL_KERNELS"] = "flashgpt/flashgpt=FOLDER"  # before the first import of kernels
    their_model.set_attn_implementation("flashgpt/flashgpt")

Nothing is overwritten. The last line is one JSON object.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels
from conf.program import program
from training.checkpoint_files import free_folder, whole_folder

FACE = """
from .flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ += ["flash_attn_func", "flash_attn_varlen_func"]
"""


@dataclass
class KernelExportSettings:
    folder: str = ""  # where the kernel will be: a new folder, or an empty one


@program("tool", KernelExportSettings)
def main(settings: KernelExportSettings, run_dir: Path) -> None:
    folder = free_folder(settings.folder)
    if (copied := Path(kernels.__file__).parent.resolve()) in folder.parents:
        raise ValueError(f"folder={folder} lies in {copied}, which is copied; give one outside of it")
    with whole_folder(folder) as temporary:
        metadata = fill(temporary / "build" / "torch-cuda")
    print(f"{folder} holds the kernels as {metadata['id']}")
    print(json.dumps({"folder": str(folder)} | metadata))


def fill(variant: Path) -> dict[str, Any]:
    """Copy the kernels to the new folder `variant`, write metadata.json there and return its contents."""
    shutil.copytree(Path(kernels.__file__).parent, variant, ignore=shutil.ignore_patterns("__pycache__"))
    with open(variant / "__init__.py", "a", encoding="utf-8") as face:
        face.write(FACE)
    contents = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(variant.rglob("*.py")))).hexdigest()[:8]
    metadata = {
        "name": "flashgpt",
        "id": f"_flashgpt_cuda_{contents}",
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return metadata


if __name__ == "__main__":
    main()
