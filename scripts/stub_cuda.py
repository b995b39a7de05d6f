"""Lets the CUDA build of torch load on a machine without CUDA: python stub_cuda.py TORCH_FOLDER.

The package index has CPU builds of torch under local versions alone, which an index without them
cannot serve. The CUDA build computes on CPUs, too, once its libraries can be loaded. This puts
libraries with the names and symbols that it asks for beside it. Each function returns 100
(cudaErrorNoDevice), so torch finds no GPU. Needs gcc and binutils.
"""

import re
import subprocess
import sys
from pathlib import Path

NEEDED = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl).*)\]")
OF_CUDA = re.compile(r"(cu|nccl|nvshmem)[A-Za-z]")


def lines(*command: str) -> list[str]:
    """Return the output of a command, by line."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main(torch: Path) -> None:
    """Compile each library that a part of torch needs and torch does not bring."""
    parts = [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]
    found = [NEEDED.search(each) for part in parts for each in lines("readelf", "-dW", str(part))]
    needed = {each[1] for each in found if each is not None} - {part.name for part in parts}
    asked = [each for part in parts for each in lines("nm", "-D", "--undefined-only", str(part))]
    version_of = dict(each.split()[-1].partition("@")[::2] for each in asked)
    versions = set(version_of.values())
    for library in sorted(needed):
        stem = library.removeprefix("lib").partition(".")[0]
        version = next((v for v in (library, stem.partition("_")[0].upper()) if v in versions), "")
        names = [
            name
            for name, of in version_of.items()
            if of == version and (version or OF_CUDA.match(name))
        ]
        compile_stub(torch / "lib" / library, sorted(names), version)


def compile_stub(library: Path, names: list[str], version: str) -> None:
    """Compile a library whose functions have these names and this version of symbols."""
    script = library.with_suffix(".map")
    script.write_text(f"{version} {{ global: *; }};")
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}"]
    options += [f"-Wl,--version-script={script}"] if version else []
    compiler = ["gcc", *options, "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=source, text=True, check=True)
    script.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
