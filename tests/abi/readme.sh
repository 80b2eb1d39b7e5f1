#!/bin/bash
# readme.sh COMPILER: the C examples in README.md compile without a warning.
set -euo pipefail
awk -f "$(dirname "${BASH_SOURCE[0]}")/fenced.awk" README.md |
    "$1" -std=c11 -Wall -Wextra -pedantic -Werror -fsyntax-only -I lib/include -x c -
