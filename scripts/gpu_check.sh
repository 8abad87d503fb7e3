#!/usr/bin/env bash
# Check a GPU in one command; options and examples: scripts/gpu_check.sh --help. Uses $PYTHON, else .venv, else python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$([[ -x $root/.venv/bin/python ]] && echo "$root/.venv/bin/python" || echo python3)}
# From a clone that nobody installed, too.
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
exec "$python" "$root/scripts/gpu_check.py" "$@"
