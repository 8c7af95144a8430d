#!/bin/sh
# Reads secrets from the files that DRAFT_ENGINE_*_KEY_FILE name, then becomes the server, which gets the signals itself.
set -eu

if [ -n "${DRAFT_ENGINE_API_KEY_FILE:-}" ]; then
    DRAFT_ENGINE_API_KEY=$(cat "$DRAFT_ENGINE_API_KEY_FILE")
    export DRAFT_ENGINE_API_KEY
fi
if [ -n "${DRAFT_ENGINE_DRAFT_API_KEY_FILE:-}" ]; then
    DRAFT_ENGINE_DRAFT_API_KEY=$(cat "$DRAFT_ENGINE_DRAFT_API_KEY_FILE")
    export DRAFT_ENGINE_DRAFT_API_KEY
fi
unset DRAFT_ENGINE_API_KEY_FILE DRAFT_ENGINE_DRAFT_API_KEY_FILE

exec draft-engine "$@"
