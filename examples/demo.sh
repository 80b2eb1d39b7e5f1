#!/bin/bash
# The main job from a bare machine: installs what is missing (said first), configures, builds to
# build/, and trains a small policy with the refit cycle. Arguments go to the example: see --help.
set -euo pipefail
# shellcheck source=.ci/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

install_missing "${build_needs[@]}"
configure -DREFIT_BUILD_EXAMPLES=ON
cmake --build "$build" --target grpo >&2
exec "$build/bin/grpo" "$@"
