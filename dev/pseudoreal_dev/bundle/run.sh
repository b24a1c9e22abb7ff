#!/usr/bin/env bash
# Runs the tests, the benchmark or the trials of a machine with a GPU. Installs nothing, needs no network and no root.
#   bash run.sh all       doctor, tests and benchmark in 10 minutes, and one file to send back; [--device cpu] [--tiny]
#   bash run.sh doctor    driver, devices, copies, links, all-reduces, and training steps from each home; [--device cpu]
#   bash run.sh test      at most 8 minutes; [--device cpu] [--tiny], and options of pytest
#   bash run.sh bench     at most 9 minutes; [--out FILE] [--folder FOLDER of the home disk] [--device cpu] [--tiny]
#   bash run.sh profile   a trace of some steps; [--model 1B|4B] [--home device|host|disk] [--tokens N] [--out FILE]
#   bash run.sh method    the trials of docs/method-plan.md at 124 M parameters, days; --data FOLDER and options, see --help
# PYTHON names the interpreter (python3); OUT the folder of the results (the present one).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
verb="${1:-}"
case "$verb" in
  all) program=benchmarks.gpu.collect ;;
  doctor) program=benchmarks.gpu.doctor ;;
  test) program=tests.gpu.run ;;
  bench) program=benchmarks.gpu.bench ;;
  profile) program=benchmarks.gpu.profile ;;
  method) program=benchmarks.method.gpu ;;
  *) sed -n '2,9s/^# //p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
shift
python="${PYTHON:-python3}"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
for wheel in "$here"/wheels/*.whl; do
  "$python" -m zipfile -e "$wheel" "$site/wheels"
done
# The folder may be read-only, and is not to be filled with compiled files.
export PYTHONPATH="$here/src:$site/wheels${PYTHONPATH:+:$PYTHONPATH}" PYTHONPYCACHEPREFIX="$site/compiled"
# Modules of the present folder do not stand before those of the bundle.
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# Threads that wait must not spin: they would take the time of those that update on the host.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
"$python" -m "$program" "$@"
