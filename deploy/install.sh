#!/bin/sh
# Install a list that requirements.py printed into an image: what the lock file pins, by its hashes; then torch, where the
# list names it, from TORCH_INDEX, and what only its CUDA builds need.
set -e
locked=$(mktemp)
grep -v '^+ ' "$1" > "$locked"
pip install --no-deps --require-hashes -r "$locked"
if grep -q '^# torch' "$1" && ! python -c 'import torch' 2>/dev/null; then
  pip install --no-index --no-deps "$TORCH_SPEC" || pip install --index-url "$TORCH_INDEX" --no-deps "$TORCH_SPEC"
  pip install "$TORCH_SPEC"
fi
# Extras that the lock file does not cover, as pyproject.toml has them.
sed -n 's/^+ //p' "$1" > "$locked"
if [ -s "$locked" ]; then pip install -r "$locked"; fi
rm "$locked"
pip check
