#!/bin/bash
# readme.sh COMPILER: the C examples in README.md and docs/ compile without a warning, each file's as
# one source.
set -euo pipefail
fenced=$(dirname "${BASH_SOURCE[0]}")/fenced.awk
found=0
for document in README.md docs/*.md; do
    grep -q '^```c$' "$document" || continue
    awk -f "$fenced" "$document" |
        "$1" -std=c11 -Wall -Wextra -pedantic -Werror -fsyntax-only -I lib/include -x c -
    found=$((found + 1))
done
[ "$found" -ge 2 ]
