#!/bin/bash
# stamp.sh: standard input to standard output, each line after the seconds since the first call.
# Lines appear as they come, so that what hung or crashed is the last one to be seen.
export LC_ALL=C
start=${EPOCHREALTIME/./}
while IFS= read -r line || [ -n "$line" ]; do
    now=$((${EPOCHREALTIME/./} - start))
    printf '%d.%06d %s\n' $((now / 1000000)) $((now % 1000000)) "$line"
done
