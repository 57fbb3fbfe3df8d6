#!/usr/bin/env bash
# The whole system in containers: build, start, train a small job over REST, kill the trainer in the middle, finish,
# and check the audit. Needs what compose_common.sh needs. Leaves nothing behind.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/compose_common.sh"

start

where="the API"
code=$(curl --silent --output /dev/null --write-out '%{http_code}' "$api/v1/jobs")
[[ $code == 401 ]] || fail "a request without a key was answered $code, not 401"
submit < deploy/smoke.yaml

where="training"
until_step 12 180
say "step 12: training runs"

where="the trainer's death"
docker compose --progress quiet kill --signal KILL trainer
read -r phase killed_at < <(call "/v1/jobs/$job" | field 'd["status"]["phase"] + " " + str(d["status"]["step"])')
[[ $phase == running ]] || fail "the job was $phase before the trainer was killed: make deploy/smoke.yaml longer"
sleep 2
docker compose --progress quiet start trainer
say "trainer killed at step $killed_at and started again"

where="the finish"
until_step $((killed_at + 5)) 120
say "training went on"
until_step 80 240
until_success

check_audit
[[ $(call "/v1/limits" | field 'd["durability"]') == fsync ]] || fail "the bus is not verified to fsync: $(call /v1/limits)"
say "ledger equation and audit hold; the bus is verified to fsync"

where="the logs"
for service in coordinator rollout reward trainer; do
  [[ $(call "/v1/jobs/$job/logs?service=$service" | field 'len(d["lines"]) > 0') == True ]] \
    || fail "the API has no log of $service"
done
say "the API serves the logs of every service"

stop
