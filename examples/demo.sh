#!/bin/bash
# The main job from a bare machine: installs what is missing (said first), builds, and trains a small
# policy with the refit cycle. Arguments go to the example: see --help.
#
#   examples/demo.sh [ARGUMENT…]           grpo.c, built to build/
#   examples/demo.sh --torch [ARGUMENT…]   grpo_torch.py, in .venv
set -euo pipefail
# shellcheck source=.ci/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

if [ "${1:-}" = --torch ]; then
    shift
    python_ready torch
    exec "$venv/bin/python" "$root/examples/grpo_torch.py" "$@"
fi
install_missing "${build_needs[@]}"
configure -DREFIT_BUILD_EXAMPLES=ON
cmake --build "$build" --target grpo >&2
exec "$build/bin/grpo" "$@"
