#!/usr/bin/env bash
# A robot arm in containers: build the image of the env workers with MetaWorld, start every service, train the example
# over REST until it reaches its goal, kill the env worker in the middle, check the audit, and fetch a video.
# Needs what compose_common.sh needs. Leaves nothing behind but images.
set -euo pipefail
export EXTRAS_ENV=sim-metaworld PACKAGES_ENV=libosmesa6
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/compose_common.sh"

start

where="training"
submit < examples/metaworld-reach-ppo.yaml
until_step 8 180
say "step 8: training runs"

where="the env worker's death"
docker compose --progress quiet kill --signal KILL env
sleep 1
docker compose --progress quiet start env
say "env worker killed and started again"

where="the finish"
until_step 40 400
until_success
check_audit
say "ledger equation and audit hold"

where="what was learnt"
rates=$(call "/v1/jobs/$job/metrics?names=eval/success" | field '[v for v in d["series"]["eval/success"] if v is not None]')
[[ $(field "d[-1] >= 0.9" <<< "$rates") == True ]] || fail "share of held-out episodes that succeed: $rates"
say "share of held-out episodes that succeed: $rates"
film=$(call "/v1/jobs/$job/videos" | field '([v["href"] for v in d["data"] if not v["error"]] or [""])[-1]')
[[ -n $film ]] || fail "no video: $(call "/v1/jobs/$job/videos")"
[[ $(call "$film" | head --bytes 8 | tail --bytes 4) == ftyp ]] || fail "$film is no MP4 file"
say "a video of a held-out episode: $film"

stop
