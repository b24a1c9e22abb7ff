#!/bin/sh
# kubectl pseudoreal, as krew installs it. It runs with the Python that PSEUDOREAL_PYTHON names, or else in an environment
# of its own beside this file, which the first call makes.
set -eu
here=$(dirname "$(readlink -f "$0")")
python=${PSEUDOREAL_PYTHON:-}

say() {
  echo "kubectl pseudoreal: $1" >&2
}

install() {
  base=$(command -v python3 || true)
  if [ -z "$base" ] || ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "it needs Python 3.11 or newer as python3; install it, or name another one in PSEUDOREAL_PYTHON"
    exit 1
  fi
  say "installing the packages that it needs, once"
  if ! "$base" -m venv "$here/environment" \
    || ! "$python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"; then
    say "they could not be installed; call it again where pip reaches its index, or name a Python that has them in PSEUDOREAL_PYTHON"
    exit 1
  fi
  touch "$here/environment/ready"
}

if [ -z "$python" ]; then
  python=$here/environment/bin/python
  [ -e "$here/environment/ready" ] || install
fi
PYTHONPATH="$here/lib${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pseudoreal_trainer.cli.command "$@"
