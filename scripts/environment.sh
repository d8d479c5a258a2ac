# Sourced by scripts/demo and scripts/test: find or make a virtual environment and install the project into it.
#
#   use_environment EXTRA    sets $python; EXTRA is an extra of pyproject.toml

use_environment() {
    local extra=$1 stamp want
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        python=$VIRTUAL_ENV/bin/python
        echo "== environment: $VIRTUAL_ENV (the active one)"
    else
        python=$root/.venv/bin/python
        echo "== environment: $root/.venv"
        [ -x "$python" ] || make_environment
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
