#!/bin/bash
# Everything from a bare machine to tested: installs what is missing (said first), configures, builds
# to build/, and runs all tests. Arguments go to ctest, for example: tests/run.sh -LE slow -R offload
set -euo pipefail
# shellcheck source=.ci/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

install_missing "${build_needs[@]}"
configure -DREFIT_BUILD_TESTS=ON
cmake --build "$build"
cd "$build"
exec ctest --output-on-failure -j "$(nproc)" "$@"
