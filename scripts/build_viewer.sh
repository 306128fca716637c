#!/usr/bin/env bash
# Bundles the npm libraries of the viewer's page, in the versions of scripts/viewer_libraries/package-lock.json.
# Needs npm and its registry.
#   bash scripts/build_viewer.sh           write strands_rollout/view/assets/libraries
#   bash scripts/build_viewer.sh --check   fail if that folder differs from a new build
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
committed="$repository/strands_rollout/view/assets/libraries"
if [[ $# -gt 1 || ($# -eq 1 && "$1" != "--check") ]]; then
  echo "usage: bash scripts/build_viewer.sh [--check]" >&2
  exit 2
fi

work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cp -- "$repository"/scripts/viewer_libraries/{package.json,package-lock.json,build.mjs,libraries.js,libraries.css} "$work"
cd "$work"
npm ci --ignore-scripts --no-audit --no-fund --loglevel error >&2
node build.mjs "$work/built"
if [[ "${1:-}" == "--check" ]]; then
  if ! diff -rq "$committed" "$work/built" >&2; then
    echo "error: strands_rollout/view/assets/libraries differs from what scripts/viewer_libraries builds; run bash scripts/build_viewer.sh and commit the result" >&2
    exit 1
  fi
  exit 0
fi
rm -rf -- "$committed"
cp -r -- "$work/built" "$committed"
