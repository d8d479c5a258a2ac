# Sourced by scripts/demo and scripts/test: find or make a virtual environment and install the project into it. One that
# has sparsekit from another folder is left as it is: the project then runs from this folder with what is installed.
#
#   use_environment EXTRA    sets $python; EXTRA is an extra of pyproject.toml

use_environment() {
    local extra=$1 stamp want other missing
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        python=$VIRTUAL_ENV/bin/python
        echo "== environment: $VIRTUAL_ENV (the active one)"
    else
        python=$root/.venv/bin/python
        echo "== environment: $root/.venv"
        [ -x "$python" ] || make_environment
    fi
    other=$(installed_elsewhere)
    if [ -n "$other" ]; then
        echo "== sparsekit is installed there from $other, which stays; this runs from $root"
        missing=$(missing_packages "$extra")
        if [ -n "$missing" ]; then
            echo "That environment lacks $missing; install what is missing there, or use an environment" \
                "without another sparsekit (deactivate makes $root/.venv)." >&2
            exit 1
        fi
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    # Installed already, for this folder and this pyproject.toml? Then there is nothing to do, network or not.
    want="$root $("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
        "$root/pyproject.toml")"
    stamp=$("$python" -c 'import sys; print(sys.prefix)')/.sparsekit-$extra
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        return
    fi
    echo "== pip install -e '.[$extra]' (TensorFlow is large; minutes on a slow line)"
    "$python" -m pip install --quiet --disable-pip-version-check -e "$root[$extra]"
    echo "$want" >"$stamp" 2>/dev/null || true
}

# The folder of a sparsekit that the environment has and that is not this one; else nothing.
installed_elsewhere() {
    (cd / && env -u PYTHONPATH "$python" - "$root") <<'PYTHON'
import sys
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("sparsekit")
if spec is not None and spec.origin is not None:
    folder = Path(spec.origin).resolve().parent.parent
    if folder != Path(sys.argv[1]).resolve():
        print(folder)
PYTHON
}

# The packages that pyproject.toml asks for, also for the extra, and that the environment does not have.
missing_packages() {
    "$python" - "$root/pyproject.toml" "$1" <<'PYTHON'
import re
import sys
from importlib.metadata import PackageNotFoundError, version

text, extra = open(sys.argv[1], encoding="utf-8").read(), sys.argv[2]
missing = []
for name in ("dependencies", extra):
    block = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    for package in re.findall(r'"([A-Za-z0-9_.-]+)', block.group(1)):
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
print(*missing)
PYTHON
}

make_environment() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            "$candidate" -m venv "$root/.venv" && return
            rm -rf "$root/.venv"
            echo "$candidate cannot make a virtual environment; install its venv module (Debian: python3-venv)." >&2
            exit 1
        fi
    done
    echo "Python 3.10 or later is needed and was not found." >&2
    exit 1
}
