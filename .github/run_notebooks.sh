#!/usr/bin/env bash
# Run all notebooks of this folder, and fail if a set-up cell has replaced torch or numpy.
set -euo pipefail
versions() { python3 -m pip freeze | grep -E '^(torch|numpy)(==| @)'; }
before=$(versions)
python3 -m jupyter nbconvert --to notebook --execute --output-dir executed ./*.ipynb
diff <(echo "$before") <(versions)
