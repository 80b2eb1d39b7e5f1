#!/bin/bash
# lib/README.md, the source tour, names every source file of lib/ and kernels/, and none that is gone.
set -euo pipefail
plan=lib/README.md
failed=0
while read -r file; do
    name=${file##*/}
    grep -q "\`$name\`" "$plan" || { echo "$plan does not say what $file is for"; failed=1; }
done < <(find lib kernels -name '*.c' | sort)
for name in $(grep -oE "\`[a-z0-9_]+\.c\`" "$plan" | tr -d "\`" | sort -u); do
    [ -n "$(find lib kernels -name "$name" -print -quit)" ] ||
        { echo "$plan names $name, which is not there"; failed=1; }
done
exit $failed
