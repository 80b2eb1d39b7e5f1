#!/bin/bash
# The modules' include rule: data flows one way, so a module includes only its own headers and those
# of the modules to its left. Also: what only one module may include, and that file names are unique.
set -euo pipefail
failed=0

complain() {
    echo "$1:$2: $3"
    failed=1
}

# modules_left_of MODULE: the modules that it may include, its own among them. A folder inside a
# module (device/cuda) is a module that the outer one may not include.
modules_left_of() {
    case $1 in
    base) echo base ;;
    config) echo base config ;;
    trust) echo base trust ;;
    device) echo base config device ;;
    device/host) echo base config device device/host ;;
    device/cuda) echo base config device device/cuda ;;
    memory) echo base config device memory ;;
    transfer) echo base config device memory transfer ;;
    offload) echo base config device memory transfer offload ;;
    wire) echo base config device wire ;;
    archive) echo base config device wire archive ;;
    net) echo base config trust wire net ;;
    store) echo base config device memory wire net store ;;
    publisher) echo base config device memory wire net store publisher ;;
    subscriber) echo base config device memory wire archive net store subscriber ;;
    controller) echo base config device memory transfer offload publisher controller ;;
    kernels) echo base kernels ;;
    esac
}

# check_include FILE LINE MODULE INCLUDED: an include of ours, "module/header.h" or "header.h".
check_include() {
    local file=$1 line=$2 module=$3 included=$4 target allowed
    case $included in
    */*) target=${included%/*} ;;
    *) target=$module ;;
    esac
    # The arithmetic on big arrays is seen by every module that moves bytes; it sees only base.
    [ "$target" = kernels ] && [ "$module" != base ] && [ "$module" != config ] && return
    for allowed in $(modules_left_of "$module"); do
        [ "$target" = "$allowed" ] && return
    done
    complain "$file" "$line" "$module is independent of \"$included\""
}

# check_file FILE MODULE: all its include lines.
check_file() {
    local file=$1 module=$2 line text
    while IFS=: read -r line text; do
        case $text in
        *'<zmq'*)
            [ "$module" = net ] || complain "$file" "$line" "only net includes <zmq.h>"
            ;;
        *'<msgpack'*)
            [ "$module" = wire ] || complain "$file" "$line" "only wire includes msgpack"
            ;;
        *'<zstd'*)
            [ "$module" = wire ] || complain "$file" "$line" "only wire includes zstd"
            ;;
        *'<yaml'*)
            [ "$module" = config ] || complain "$file" "$line" "only config includes libyaml"
            ;;
        *'"'*'"'*)
            text=${text#*\"}
            check_include "$file" "$line" "$module" "${text%%\"*}"
            ;;
        esac
    done < <(grep -nE '^[[:space:]]*#[[:space:]]*include' "$file")
}

# check_user FILE: bindings and examples see the public API only.
check_user() {
    local file=$1 folder line text
    folder=$(dirname "$file")
    while IFS=: read -r line text; do
        text=${text#*\"}
        text=${text%%\"*}
        # The benchmark of the kernels that code deltas, and what judges free memory; no more of refit.
        case $file:$text in bench/bench_codec.c:kernels/delta.h | \
            bench/bench_codec.c:kernels/digest.h | \
            bindings/cli/complain.c:base/text.h | \
            bench/bench_report.c:memory/budget.h) continue ;; esac
        [ "$folder" = bench ] && [ -f "bindings/cli/$text" ] && continue
        [ -f "$folder/$text" ] || complain "$file" "$line" "\"$text\" is not a public header"
    done < <(grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "$file")
    # What refit is measured against is made of the same parts.
    case $file in bench/bench_raw.c | bench/bench_limit.c | bench/bench_codec.c) return ;; esac
    while IFS=: read -r line text; do
        complain "$file" "$line" "users of refit do not see its parts"
    done < <(grep -nE '#[[:space:]]*include[[:space:]]*<(zmq|msgpack|yaml|xxhash|zstd)' "$file")
}

while read -r file; do
    module=$(dirname "${file#lib/}")
    case $module in
    include | include/*) ;;
    *) check_file "$file" "$module" ;;
    esac
done < <(find lib -name '*.[ch]' | sort)
for file in kernels/*.[ch]; do
    check_file "$file" kernels
done
while read -r file; do
    check_user "$file"
done < <(find bench bindings examples -name '*.[ch]' | sort)

# No two sources or headers share a name. (The public headers refit.h and refit/NAME.h may: their
# names are those of what they declare.)
twice=$(find lib kernels bench bindings examples tests -name '*.[ch]' -not -path 'lib/include/*' \
    -not -path '*/build*' -printf '%f\n' | sort | uniq -d)
for name in $twice; do
    complain "$(find lib kernels bench bindings examples tests -name "$name" | paste -sd ' ')" 1 \
        "$name is the name of more than one file"
done
exit $failed
