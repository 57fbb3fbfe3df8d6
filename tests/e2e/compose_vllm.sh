#!/usr/bin/env bash
# Rollout with vLLM in containers: build, start, train a small job over REST to its end, check the audit and the
# log-probs, and chat with its checkpoint: vLLM and the embedded engine, on the same worker, give the same answers.
# The image has gigabytes of packages.
# Needs what compose_common.sh needs. Leaves nothing behind but images.
set -euo pipefail
export COMPOSE_FILE=docker-compose.yml:deploy/vllm.yml
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/compose_common.sh"

engine='rollout: { engine: vllm, kv_cache_gib: 0.25 }'

start

where="training"
submit < <(cat deploy/smoke.yaml && echo "$engine")
until_step 1 400
say "step 1: training runs"
processes=$(docker compose exec --no-TTY rollout sh -c 'cat /proc/[0-9]*/cmdline | tr "\0" " "')
[[ $processes == *VLLM* ]] || fail "vLLM has no process in the container of rollout, only: $processes"
until_step 80 400
until_success
check_audit
say "ledger equation and audit hold"

where="the log-probs"
worst=$(call "/v1/jobs/$job/metrics?names=mismatch/logprob" |
  field 'max(v for v in d["series"]["mismatch/logprob"] if v is not None)')
[[ $(field "d < 1e-4" <<< "$worst") == True ]] || fail "log-probs of vLLM and the trainer differ by $worst"
say "largest mean difference between log-probs of vLLM and the trainer: $worst"

where="the answers"
submit <<< "{ kind: serving, name: vllm, model: { path: job:smoke@final }, serving: { hold_s: 240 }, $engine }"
submit <<< "{ kind: serving, name: embedded, model: { path: job:smoke@final }, serving: { hold_s: 240 } }"
declare -A answers=([vllm]="" [embedded]="")
for sum in 1+2 3+4 2+2 5+3; do
  for name in "${!answers[@]}"; do
    answers[$name]+="$sum=$(call /v1/chat/completions --max-time 300 -X POST -H 'Content-Type: application/json' --data-binary \
      "{\"model\": \"$name\", \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": \"$sum=\"}]}" |
      field 'd["choices"][0]["message"]["content"]') "
  done
done
say "the checkpoint says: ${answers[vllm]}"
[[ ${answers[vllm]} =~ =[0-9] ]] || fail "no answer has a digit"
[[ ${answers[vllm]} == "${answers[embedded]}" ]] || fail "from the embedded engine it says: ${answers[embedded]}"

stop
