#!/usr/bin/env bash
# Installs what building and testing need: Debian packages where it may, a virtual environment.
# SPDX-License-Identifier: Apache-2.0
#
# usage: setup.sh [TOOL...]   TOOL: further commands that must be there (clang-format)
# Quick when nothing is missing: a stamp in the environment names what was installed.
source "$(dirname "$0")/common.sh"

missing_packages() {
  local tool
  for tool in cmake g++ "$@"; do
    command -v "$tool" >/dev/null || echo "$tool"
  done
  command -v ninja >/dev/null || echo ninja-build
  [[ -e /usr/include/absl/status/statusor.h ]] || echo libabsl-dev
  [[ -e /usr/include/gtest/gtest.h ]] || echo libgtest-dev
  [[ -e /usr/include/benchmark/benchmark.h ]] || echo libbenchmark-dev
  if [[ -z "${PYTHON:-}" ]] && ! command -v python3 >/dev/null; then
    echo python3 python3-venv python3-dev
  elif command -v "${PYTHON:-python3}" >/dev/null; then
    "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    "${PYTHON:-python3}" -c 'import os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
      echo python3-dev
  fi
}

install_packages() {
  local as_root=() advice="apt-get install -y $*"
  command -v apt-get >/dev/null || die "missing: $*; install these (Debian's names) and run again"
  if [[ "$(id -u)" != 0 ]]; then
    sudo -n true 2>/dev/null || die "missing: $*; run: sudo $advice"
    as_root=(sudo -n)
  fi
  say "installing $*"
  mkdir -p build
  if ! {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "$@"
  } >build/apt.log 2>&1; then
    die "could not install $* (see build/apt.log); run: $advice"
  fi
}

check_cmake() {
  local version
  version="$(cmake --version | sed -n '1s/.* //p')"
  [[ "$(printf '3.25\n%s\n' "$version" | sort -V | head -1)" == 3.25 ]] ||
    die "cmake is $version, 3.25 or newer is needed: apt-get install cmake, or pip install cmake"
}

install_environment() {
  local stamp="$PGQA_VENV/.pgqa-setup" wanted
  wanted="$(cat scripts/requirements.txt <("$PGQA_INTERPRETER" -VV) | sha256sum)"
  if [[ -x "$PGQA_ENV_PYTHON" && "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then
    return
  fi
  mkdir -p build
  if [[ ! -x "$PGQA_ENV_PYTHON" ]] || ! "$PGQA_ENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    "$PGQA_INTERPRETER" -m venv --clear "$PGQA_VENV" >build/venv.log 2>&1 ||
      die "could not make $PGQA_VENV (see build/venv.log); on Debian: apt-get install python3-venv"
  fi
  say "installing Python packages into $PGQA_VENV (torch is large: a minute or two)"
  "$PGQA_ENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile \
    -r scripts/requirements.txt >build/pip.log 2>&1 ||
    die "pip install -r scripts/requirements.txt failed: $(tail -1 build/pip.log)"
  echo "$wanted" >"$stamp"
}

mapfile -t packages < <(missing_packages "$@")
if ((${#packages[@]})); then
  # One line may name several packages.
  read -ra packages <<<"${packages[*]}"
  install_packages "${packages[@]}"
fi
check_cmake
find_python
install_environment
