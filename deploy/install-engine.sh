#!/bin/sh
# Install what a rollout engine pins (services/rollout/engines/requirements/NAME.txt) into an image, all of it and nothing
# else, as `penstock engines install NAME` does: torch from TORCH_INDEX, the rest from pip's index. The pins have no hashes.
set -e
torch=$(grep '^torch==' "$1")
pip install --no-index --no-deps "$torch" || pip install --index-url "$TORCH_INDEX" --no-deps "$torch"
pip install --no-deps -r "$1"
python -c "import $(basename "$1" .txt), transformers, nats, xxhash, msgspec"
