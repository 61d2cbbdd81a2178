"""Install Penstock from this folder with the versions of constraints.txt and the files of hashes.txt.

    python scripts/locked_install.py [EXTRA ...]   into the environment of this Python, editable
    python scripts/locked_install.py --update      write hashes.txt anew, from the package index

pip takes no hashes from a constraints file. So pip first says which files it would install here; then
it installs those and no others, and refuses each file whose SHA-256 is not in hashes.txt. A file on this
machine's own disk that its pip configuration offers (a wheel that its operator built) is told, not
refused. Needs the standard library and pip.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
CONSTRAINTS, HASHES = ROOT / "constraints.txt", ROOT / "hashes.txt"
INDEX = "https://pypi.org/simple"
PIP = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
BUILDER = "setuptools"  # builds this package, and the few that have no wheel
_FILE = re.compile(r'href="[^"]*/([^"/#]+)#sha256=([0-9a-f]{64})"')
_OTHERS = re.compile(  # wheels of systems and Pythons that Penstock does not run on
    r"-(?:pp\d|cp(?:2|3[0-9]t?-|310|314|315)(?!.*abi3))|win32|win_a|musllinux|i686|armv|ppc64|s390x|riscv"
    r"|cp31\dt-|loongarch|pyodide|wasm|ios_|android_"
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Return the version of each package in a constraints or hashes file, by canonical name."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {canonical(name): version for name, version in found}


def known_hashes(text: str) -> dict[str, set[str]]:
    """Return the allowed SHA-256 of the files of each package."""
    blocks = re.findall(r"^([\w.-]+)==[^\s;]+((?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
    return {
        canonical(name): set(re.findall(r"sha256:([0-9a-f]{64})", rest)) for name, rest in blocks
    }


def requirement(item: dict[str, Any], known: dict[str, set[str]]) -> str:
    """Return the line with which pip installs one item of its report, and only with a known hash."""
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    url = urlsplit(item["download_info"]["url"])
    allowed = set(known.get(canonical(name), ()))
    if url.scheme == "file":
        own = hashlib.sha256(Path(unquote(url.path)).read_bytes()).hexdigest()
        if own not in allowed:
            print(f"{name} {version}: a file of this machine, not in {HASHES.name}: {url.path}")
            allowed = {own}
    if not allowed:
        raise SystemExit(
            f"{name} {version} is not in {HASHES.name}: add it to {CONSTRAINTS.name}, then run "
            "scripts/locked_install.py --update"
        )
    return " ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in sorted(allowed))])


def install(extras: list[str]) -> None:
    known = known_hashes(HASHES.read_text())
    here = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    constrained = ["-c", str(CONSTRAINTS)]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        lock = Path(scratch, "lock.txt")

        def install_hashed(*words: str) -> None:
            look = ["--dry-run", "--report", str(report), *constrained, *words]
            subprocess.run([*PIP, *look], check=True)
            items = json.loads(report.read_text())["install"]
            files = [one for one in items if "dir_info" not in one["download_info"]]
            if files:
                lock.write_text("".join(f"{requirement(one, known)}\n" for one in files))
                how = ["--require-hashes", "--no-deps", "--no-build-isolation", "-r", str(lock)]
                subprocess.run([*PIP, *how], check=True)

        install_hashed(BUILDER)
        install_hashed("--no-build-isolation", "-e", here)
    subprocess.run([*PIP, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def files_of(name: str, version: str) -> list[str]:
    """Return the SHA-256 of every file of a version that can be installed where Penstock runs."""
    with urllib.request.urlopen(f"{INDEX}/{canonical(name)}/", timeout=60) as page:
        files = _FILE.findall(page.read().decode())
    start = f"{canonical(name)}-{version.removesuffix('.0') if name == 'cuda-toolkit' else version}"
    return sorted(
        digest
        for file, digest in files
        if re.match(rf"{re.escape(start)}(?:\.0)?(?:-|\.tar|\.zip)", _normal(unquote(file)))
        and not _OTHERS.search(file)
    )


def _normal(file: str) -> str:
    """Return a file's name with its package's name in canonical form."""
    found = re.match(r"(.+?)-(\d.*)", file)
    return f"{canonical(found[1])}-{found[2]}" if found else file


def update() -> None:
    old = known_hashes(HASHES.read_text()) if HASHES.exists() else {}
    same = pins(HASHES.read_text()) if HASHES.exists() else {}
    wanted = re.findall(r"^([\w.-]+)==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda pin: files_of(*pin), wanted))
    lines = [
        f"# SHA-256 of the files of {CONSTRAINTS.name}; written by scripts/locked_install.py --update"
    ]
    for (name, version), digests in zip(wanted, found, strict=True):
        if same.get(canonical(name)) == version:  # keep what another index gave
            digests = sorted({*digests, *old[canonical(name)]})
        if not digests:
            raise SystemExit(f"{name}=={version}: the index has no file for it")
        lines.append(
            " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{d}" for d in digests)])
        )
    HASHES.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    update() if sys.argv[1:] == ["--update"] else install(sys.argv[1:])
