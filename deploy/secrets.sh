#!/bin/sh
# Make .env for docker-compose.yml: an API key and a password of the bus for each service. Keeps what is there.
set -eu
cd "$(dirname "$0")/.."
umask 077
touch .env
chmod 600 .env
secret() { # secret NAME: a line NAME=RANDOM, unless .env has one; begins with a letter, so that no parser takes it for a number
  grep -q "^$1=" .env || printf '%s=s%s\n' "$1" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" >> .env
}
secret PENSTOCK_API_KEYS
for role in COORDINATOR ROLLOUT ENV REWARD TRAINER SUPERVISOR OPERATOR; do secret "PENSTOCK_NATS_$role"; done
echo "$PWD/.env has the secrets; PENSTOCK_API_KEY is: $(sed -n 's/^PENSTOCK_API_KEYS=//p' .env | cut -d, -f1)"
