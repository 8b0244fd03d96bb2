# Sourced by quickstart.sh and test.sh: `install EXTRA...` makes a virtual environment, installs this folder into it with
# the extras, and sets $python to its interpreter. PYTHON chooses the base interpreter, VENV the folder.

fail() {
    echo "error: $*" >&2
    exit 2
}

# Succeeds if jax and this package support the interpreter.
supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON does not exist: give an interpreter of Python 3.11 to 3.13"
        supported "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | head -n 1): Python 3.11 to 3.13 is needed"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    command -v python3 >/dev/null || fail "python3 does not exist: install Python 3.11 to 3.13 (apt install python3 python3-venv)"
    fail "$(python3 --version) is not supported: install Python 3.11 to 3.13, or give one as PYTHON=/path/to/python3.12"
}

make_venv() {
    local base="$1" of_base of_venv
    if [ -x "$venv/bin/python" ] && supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        of_base=$("$base" --version) of_venv=$("$venv/bin/python" --version)
        if [ -n "${PYTHON:-}" ] && [ "$of_base" != "$of_venv" ]; then
            fail "PYTHON=$PYTHON is $of_base and $venv holds $of_venv: give another folder as VENV=DIR, or remove $venv"
        fi
        return
    fi
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        fail "$venv is not a virtual environment: give another folder as VENV=DIR"
    fi
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        local package
        package=$("$base" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        fail "$base cannot make virtual environments: install $package (as root: apt install $package) and start again"
    fi
    echo "Making $venv with $("$base" --version)"
    "$base" -m venv --clear "$venv" || fail "making $venv failed (see above): free disk space, or give another folder as VENV=DIR"
}

# Installs once for each set of extras, and again when pyproject.toml has changed.
install() {
    local extras="" name wanted stamp
    for name in "$@"; do extras="${extras:+$extras,}$name"; done
    venv="${VENV:-.venv}"
    local base
    base=$(find_python) || exit $?
    make_venv "$base"
    python="$venv/bin/python"
    wanted="$extras $(cksum <pyproject.toml) $PWD"
    stamp="$venv/.noloco_jax_installed"
    if grep -qxF -- "$wanted" "$stamp" 2>/dev/null; then
        return
    fi
    echo "Installing noloco_jax${extras:+ with $extras} into $venv (some minutes the first time)"
    # Python compiles what it imports, a tenth of the 12,000 files. If it may not write bytecode, as in many containers, pip
    # compiles all, as every process would otherwise compile its imports anew (6 s).
    local compile=--no-compile
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile
    "$python" -m pip install --quiet --disable-pip-version-check $compile --editable ".${extras:+[$extras]}" ||
        fail "the installation failed (see above): it needs a network, or a package index in pip's configuration"
    echo "$wanted" >>"$stamp"
}
