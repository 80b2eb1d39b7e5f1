#!/bin/bash
# lib/README.md, the source tour, names every source file of lib/ and kernels/, and no other.
set -euo pipefail
tour=lib/README.md
failed=0
while read -r file; do
    name=${file##*/}
    grep -q "\`$name\`" "$tour" || { echo "$tour does not say what $file is for"; failed=1; }
done < <(find lib kernels -name '*.c' | sort)
for name in $(grep -oE "\`[a-z0-9_]+\.c\`" "$tour" | tr -d "\`" | sort -u); do
    [ -n "$(find lib kernels -name "$name" -print -quit)" ] ||
        { echo "$tour names $name, which is not there"; failed=1; }
done
exit $failed
