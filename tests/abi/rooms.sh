#!/bin/bash
# The rooms' include rule: data flows one way, so a room includes only its own headers and those of
# the rooms to its left. Also: what only one room may include, and that file names are unique.
set -euo pipefail
failed=0

complain() {
    echo "$1:$2: $3"
    failed=1
}

# rooms_left_of ROOM: the rooms that it may include, its own among them.
rooms_left_of() {
    case $1 in
    base) echo base ;;
    config) echo base config ;;
    trust) echo base trust ;;
    device) echo base config device ;;
    memory) echo base config device memory ;;
    transfer) echo base config device memory transfer ;;
    offload) echo base config device memory transfer offload ;;
    wire) echo base config device wire ;;
    archive) echo base config device wire archive ;;
    net) echo base config trust wire net ;;
    store) echo base config device memory transfer wire net store ;;
    publisher) echo base config device memory transfer wire net store publisher ;;
    subscriber) echo base config device memory transfer wire net store subscriber ;;
    controller) echo base config device memory transfer offload publisher controller ;;
    kernels) echo base kernels ;;
    esac
}

# check_include FILE LINE ROOM INCLUDED: an include of ours, "room/header.h" or "header.h".
check_include() {
    local file=$1 line=$2 room=$3 included=$4 target allowed
    case $included in
    */*) target=${included%%/*} ;;
    *) target=$room ;;
    esac
    # The arithmetic on big arrays is seen by every room that moves bytes; it sees only base.
    [ "$target" = kernels ] && [ "$room" != base ] && [ "$room" != config ] && return
    for allowed in $(rooms_left_of "$room"); do
        [ "$target" = "$allowed" ] && return
    done
    complain "$file" "$line" "$room must not know \"$included\""
}

# check_file FILE ROOM: all its include lines.
check_file() {
    local file=$1 room=$2 line text
    while IFS=: read -r line text; do
        case $text in
        *'<zmq'*)
            [ "$room" = net ] || complain "$file" "$line" "only net includes <zmq.h>"
            ;;
        *'<msgpack'*)
            [ "$room" = wire ] || complain "$file" "$line" "only wire includes msgpack"
            ;;
        *'<zstd'*)
            [ "$room" = wire ] || complain "$file" "$line" "only wire includes zstd"
            ;;
        *'<yaml'*)
            [ "$room" = config ] || complain "$file" "$line" "only config includes libyaml"
            ;;
        *'"'*'"'*)
            text=${text#*\"}
            check_include "$file" "$line" "$room" "${text%%\"*}"
            ;;
        esac
    done < <(grep -nE '^[[:space:]]*#[[:space:]]*include' "$file")
}

# check_user FILE: bindings and examples stand outside the door.
check_user() {
    local file=$1 folder line text
    folder=$(dirname "$file")
    while IFS=: read -r line text; do
        text=${text#*\"}
        text=${text%%\"*}
        # A benchmark of the kernels that code deltas, and what judges free memory; no more of refit.
        case $file:$text in bindings/cli/bench_codec.c:kernels/delta.h | \
            bindings/cli/bench_codec.c:kernels/digest.h | \
            bindings/cli/complain.c:base/text.h | \
            bindings/cli/bench_room.c:memory/budget.h) continue ;; esac
        [ -f "$folder/$text" ] || complain "$file" "$line" "\"$text\" is not a public header"
    done < <(grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "$file")
    # What refit is measured against is made of the same parts.
    case $file in bindings/cli/bench_raw.c | bindings/cli/bench_limit.c | \
        bindings/cli/bench_codec_rivals.c) return ;; esac
    while IFS=: read -r line text; do
        complain "$file" "$line" "users of refit do not see its parts"
    done < <(grep -nE '#[[:space:]]*include[[:space:]]*<(zmq|msgpack|yaml|xxhash|zstd)' "$file")
}

for file in lib/*/*.[ch]; do
    room=$(basename "$(dirname "$file")")
    [ "$room" = include ] || check_file "$file" "$room"
done
for file in kernels/*.[ch]; do
    check_file "$file" kernels
done
while read -r file; do
    check_user "$file"
done < <(find bindings examples -name '*.[ch]' | sort)

# A name says where one is: no two sources or headers share one. (refit.h and refit/NAME.h are the
# door; their names are those of what they open.)
twice=$(find lib kernels bindings examples tests -name '*.[ch]' -not -path 'lib/include/*' \
    -not -path '*/build*' -printf '%f\n' | sort | uniq -d)
for name in $twice; do
    complain "$(find lib kernels bindings examples tests -name "$name" | paste -sd ' ')" 1 \
        "$name is the name of more than one file"
done
exit $failed
