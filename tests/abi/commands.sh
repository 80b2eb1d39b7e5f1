#!/bin/bash
# commands.sh REFIT: the shell blocks of README.md and docs/ name existing subcommands and options of the
# command, existing options of the configuration, and executable scripts.
set -euo pipefail
refit=$1
failed=0
seen=0

complain() {
    printf '%s: %s\n' "$1" "$2" >&2
    failed=1
}

# shell_lines FILE: the lines of its shell blocks, continued ones joined, without comments.
shell_lines() {
    awk '/^```sh$/ { inside = 1; next } /^```/ { inside = 0 } inside' "$1" |
        sed -e ':a' -e '/\\$/N; s/\\\n//; ta' -e 's/[[:space:]]#.*//'
}

# check_refit FILE SUBCOMMAND WORD…: what follows build/bin/refit.
check_refit() {
    local document=$1 command=$2 help word
    shift 2
    if ! help=$("$refit" "$command" --help 2>&1); then
        complain "$document" "refit has no command $command"
        return
    fi
    if [ "$command" = bench ] && ! grep -q "^  $1 " <<<"$help"; then
        complain "$document" "refit bench has no $1"
    fi
    for word in "$@"; do
        case $word in
        --*) grep -qwe "${word%%=*}" <<<"$help" || complain "$document" "refit $command has no $word" ;;
        [a-z]*.[a-z_]*=*)
            grep -q "^${word%%=*}:" <<<"$options" || complain "$document" "no option ${word%%=*}"
            ;;
        esac
    done
    seen=$((seen + 1))
}

options=$("$refit" config)
for document in README.md docs/*.md; do
    while read -r -a words; do
        case ${words[0]:-} in
        build/bin/refit)
            check_refit "$document" "${words[@]:1}"
            ;;
        tests/*.sh | examples/*.sh)
            [ -x "${words[0]}" ] || complain "$document" "${words[0]} cannot be run"
            ;;
        esac
    done < <(shell_lines "$document")
    # Commands within a sentence or a table: `build/bin/refit …`
    while read -r -a words; do
        check_refit "$document" "${words[@]:1}"
    done < <(tr '`' '\n' <"$document" | grep '^build/bin/refit [a-z][^…]*$')
done
[ "$seen" -gt 20 ] || complain docs "only $seen commands were found"
exit "$failed"
