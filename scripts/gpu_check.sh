#!/usr/bin/env bash
# Parity on an accelerator, in under 5 minutes: the precision in force, tiny and base on the device, bfloat16.
#
#   scripts/gpu_check.sh [FOLDER FOR REPORTS]
#
# Needs a Python with jax for the accelerator, torch (the reference may stay on the CPU) and this package. Exit status 0
# if everything is equal, 1 if not, 4 if jax sees no accelerator.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
REPORTS=${1:-runs/gpu_check}
mkdir -p "$REPORTS"

"$PYTHON" - <<'CHECK' || exit 4
import sys
import jax

devices = jax.devices()
print("jax", jax.__version__, "on", ", ".join(f"{device.device_kind} ({device.platform})" for device in devices))
sys.exit(devices[0].platform == "cpu")
CHECK

status=0
# Its first rung says whether TF32 is in force under the default settings, and under those the check runs with.
"$PYTHON" -m parity check --preset tiny --keep-going --report "$REPORTS/tiny" || status=1
"$PYTHON" -m parity check --preset base --keep-going --report "$REPORTS/base" \
    --rungs preflight inventory weights forward loss gradients half_width || status=1
exit $status
