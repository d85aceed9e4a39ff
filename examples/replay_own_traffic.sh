#!/usr/bin/env bash
# What other sizes, and other policies, would have made of the requests of your own engines.
#
#   examples/replay_own_traffic.sh 1h
#   CAPACITIES=64GiB,256GiB,1TiB examples/replay_own_traffic.sh 1h
#
# Records what is asked of the daemon for so long (lengths, and which prompts begin alike; no text, no names), then
# replays it with as much room as you say: sizes, or shares of all blocks that were asked for.
set -euo pipefail
for_time=${1:-15min}
trace=${TRACE:-trace-$(date +%Y%m%dT%H%M%S).jsonl}
kvstore=${KVSTORE:-kvstore}

$kvstore record "$trace" --for "$for_time"
$kvstore replay "$trace" --capacity "${CAPACITIES:-1%,10%,50%}"
echo "kept: $trace"
