# shellcheck shell=bash
# Shared by the tests of the containers: secrets, calls of the API, the job, its audit, and an end that leaves nothing
# behind. Sourced by compose.sh, compose_robot.sh and compose_vllm.sh. Needs Docker with Compose v2, curl and python3.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

secret() { python3 -c 'import secrets; print("s" + secrets.token_hex(16))'; }

PENSTOCK_API_KEYS=$(secret)
for role in COORDINATOR ROLLOUT ENV REWARD TRAINER SUPERVISOR OPERATOR; do export "PENSTOCK_NATS_$role=$(secret)"; done
# Whatever of these images is here; the compose file pins versions.
export PENSTOCK_NATS_IMAGE=${PENSTOCK_NATS_IMAGE-nats:2-alpine} PENSTOCK_REDIS_IMAGE=${PENSTOCK_REDIS_IMAGE-redis:7-alpine}
export PENSTOCK_PYTHON_IMAGE=${PENSTOCK_PYTHON_IMAGE-python:3.11-slim}
PENSTOCK_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PENSTOCK_API_KEYS PENSTOCK_PORT COMPOSE_PROJECT_NAME="penstock-e2e-$$"
api=http://127.0.0.1:$PENSTOCK_PORT
job="" where="the build"

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

call() { # call PATH [curl options]: body of a successful reply
  local path=$1
  shift
  curl --silent --show-error --fail-with-body --max-time 20 -H "Authorization: Bearer $PENSTOCK_API_KEYS" "$@" "$api$path"
}

field() { # field EXPRESSION: value of a Python expression over the JSON document `d` on stdin
  python3 -c 'import json, sys; d = json.load(sys.stdin); print(eval(sys.argv[1], {"d": d}))' "$1"
}

cleanup() {
  local rc=$?
  trap - EXIT INT TERM
  if ((rc)); then
    echo "FAILED in $where; the last lines of every service:" >&2
    [[ -n $job ]] && { call "/v1/jobs/$job" || true; call "/v1/jobs/$job/why" || true; } >&2
    docker compose logs --no-color --tail 40 >&2 || true
    docker compose ps --all >&2 || true
  fi
  docker compose down --volumes --timeout 10 >/dev/null 2>&1 || true
  exit "$rc"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() { # build the images and start every service
  docker compose build --quiet
  say "images built"
  where="the start"
  docker compose --progress quiet up --detach --wait --wait-timeout 300
  say "all services healthy"
}

submit() { # submit: the job file on stdin; sets `job`. The reply waits for the trial of a simulator, which imports much
  job=$(call /v1/jobs --max-time 180 -X POST -H 'Content-Type: application/yaml' --data-binary @- | field 'd["id"]')
  say "submitted $job"
}

until_step() { # until_step N SECONDS: wait until the job has made N updates
  local step phase message end=$((SECONDS + $2))
  while ((SECONDS < end)); do
    read -r phase step message < <(
      call "/v1/jobs/$job" | field '"{phase} {step} {message}".format_map(d["status"]).replace("\n", " ")'
    )
    [[ $phase == failed || $phase == cancelled || $phase == paused ]] && fail "the job is $phase at step $step: $message"
    ((step >= $1)) && return
    sleep 0.2
  done
  fail "the job is $phase at step $step, not at $1, after $2 s: $message"
}

until_success() { # wait for the end of a job that has made its last update
  local phase
  for _ in $(seq 100); do
    phase=$(call "/v1/jobs/$job" | field 'd["status"]["phase"]')
    [[ $phase == running ]] || break
    sleep 0.3
  done
  [[ $phase == succeeded ]] || fail "the job ended as $phase"
  say "the job succeeded"
}

check_audit() {
  where="the audit"
  call "/v1/jobs/$job" | field 'd["status"]["draws"]'
  [[ $(call "/v1/jobs/$job" | field \
    '(lambda n: n["drawn"] == n["trained"] + sum(n["dropped"].values()) + n["in_flight"] and n["in_flight"] == 0)(d["status"]["draws"])') == True ]] \
    || fail "drawn is not trained + dropped + in flight"
  [[ $(call "/v1/jobs/$job/audit" | field 'd["ok"]') == True ]] \
    || fail "the audit found violations: $(call "/v1/jobs/$job/audit")"
}

stop() { # all services stop by themselves, with exit status 0
  local bad
  where="the end"
  docker compose --progress quiet stop --timeout 30
  say "stopped"
  bad=$(docker compose ps --all --format '{{.Service}} {{.ExitCode}}' | awk '$2 != 0 && $1 != "redis" && $1 != "nats"')
  [[ -z $bad ]] || fail "services did not stop cleanly: $bad"
  echo "PASSED"
}
