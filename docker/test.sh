#!/bin/sh
# `make docker-test`: the profile cpu with a real engine. Up till healthy, one answer with drafts, a drain, down.
set -eu
cd "$(dirname "$0")"
DRAFT_ENGINE_API_KEY=${DRAFT_ENGINE_API_KEY:-$(python3 -c 'import secrets; print(secrets.token_hex(16))')}
export DRAFT_ENGINE_API_KEY
trap 'docker compose --profile cpu down' EXIT

docker compose --profile cpu up --detach --wait
docker compose --profile cpu exec draft sh -c 'test "$(id -u)" -eq 10001'
answer=$(curl --fail --silent --show-error "http://127.0.0.1:${TARGET_PORT:-8000}/v1/chat/completions" \
    --header "authorization: Bearer $DRAFT_ENGINE_API_KEY" --header 'content-type: application/json' \
    --data '{"messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0, "max_completion_tokens": 32}')
echo "$answer" | python3 -c 'import json, sys; draft = json.load(sys.stdin)["draft"]; print(draft); sys.exit(not draft["proposed"])'

docker compose --profile cpu stop draft
test "$(docker compose --profile cpu ps --all --format '{{.ExitCode}}' draft)" = 0
echo "docker-test: ok"
