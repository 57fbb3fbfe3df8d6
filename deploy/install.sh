#!/bin/sh
# Install a list of requirements into an image: torch, where the list names it, first and from TORCH_INDEX.
set -e
if grep -q '^torch' "$1" && ! python -c 'import torch' 2>/dev/null; then
  pip install --no-index --no-deps "$TORCH_SPEC" || pip install --index-url "$TORCH_INDEX" --no-deps "$TORCH_SPEC"
fi
pip install -r "$1"
