#!/usr/bin/env bash
# Runs all notebooks of this folder, and says whether the torch and numpy that were there still are.
set -euo pipefail
versions() { python3 -m pip freeze | grep -E '^(torch|numpy)(==| @)'; }
before=$(versions)
python3 -m jupyter nbconvert --to notebook --execute --output-dir executed ./*.ipynb
diff <(echo "$before") <(versions)
