#!/usr/bin/env bash
# Formats C++ and CUDA sources in place, or checks them with --check.
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "$0")/common.sh"

command -v clang-format >/dev/null || die "no clang-format: apt-get install clang-format"
[[ "$(clang-format --version)" == *"version 14."* ]] ||
  say "this is $(clang-format --version); the sources are formatted with version 14"
mode=(-i)
if [[ "${1:-}" == --check ]]; then
  mode=(--dry-run -Werror)
fi
find include src graphs tests bench examples -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -r clang-format "${mode[@]}" ||
  die "not formatted as .clang-format says: run make format"
