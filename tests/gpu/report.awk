# report.awk: results.json, which has an object without objects in it on every line, as Markdown:
# the machine, the goals, the benchmarks (a column for each row of figures), what failed, the steps.

# Takes the line apart: key[1..n], value[key].
function take(line,    name, text) {
    split("", value)
    n = 0
    while (match(line, /"[^"]*":/)) {
        name = substr(line, RSTART + 1, RLENGTH - 3)
        line = substr(line, RSTART + RLENGTH)
        if (substr(line, 1, 1) == "\"") {
            match(line, /^"([^"\\]|\\.)*"/)
            text = substr(line, 2, RLENGTH - 2)
        } else {
            match(line, /^[^,}]*/)
            text = substr(line, 1, RLENGTH)
        }
        line = substr(line, RLENGTH + 1)
        key[++n] = name
        value[name] = text
    }
    return n
}

function is_number(text) { return text ~ /^-?[0-9.]+([eE][-+]?[0-9]+)?$/ }

# Four digits that count; whole numbers as they are.
function shown(text) { return is_number(text) && text ~ /[.eE]/ ? sprintf("%.4g", text) : text }

# What tells the rows of one benchmark apart, but for the way.
function heading(    text) {
    text = value["list"]
    if (value["transport"] != "") text = value["transport"] ", " value["workers"]
    if (value["reclaim"] == "true") text = text (text == "" ? "" : ", ") "memory given back"
    if (value["reclaim"] == "false") text = text (text == "" ? "" : ", ") "memory kept"
    return text
}

# goal WORDS FIGURE SIGN BOUND: against the row at hand.
function goal(words, figure, sign, bound,    met) {
    if (!(figure in value) || !is_number(value[figure])) return
    met = sign == ">=" ? value[figure] + 0 >= bound : value[figure] + 0 <= bound
    if (heading() != "") words = words " (" heading() ")"
    goals[++goal_count] = sprintf("| %s | %s %s | %s | %s |", words, \
        sign == ">=" ? "at least" : "at most", bound, shown(value[figure]), met ? "yes" : "**no**")
}

function hold_against_goals(    small) {
    small = value["list"] == "small"
    if (value["bench"] == "offload" && value["reclaim"] == "false") {
        goal("offload over one large copy", "ratio_to_limit_out", ">=", small ? 0.8 : 0.95)
        goal("restore over one large copy", "ratio_to_limit_back", ">=", small ? 0.8 : 0.95)
        if (!small) goal("speed-up over the pageable path", "speedup_over_pageable", ">=", 10)
        goal("blocked, with a pause meanwhile", "blocked_restore_ratio", "<=", 0.02)
        goal("blocked, with work meanwhile", "blocked_busy_ratio", "<=", 0.02)
    }
    if (value["bench"] == "offload") goal("allocations a cycle", "allocations_per_cycle", "<=", 0)
    if (value["bench"] == "remap") {
        goal("unmap, ms a GiB", "unmap_ms_per_gib", "<=", 5)
        goal("map, ms a GiB", "map_ms_per_gib", "<=", 5)
    }
    goal("first pin over cuMemHostAlloc", "speedup_over_host_alloc", ">=", 5)
    goal("hand-over, over a copy on the device", "ratio_to_device_copy", ">=", 0.8)
}

# One more column of a benchmark's table; the ways of one list have a table of their own.
function keep_column(    name, i, bench) {
    bench = value["bench"]
    if (value["way"] != "" && heading() != "") bench = bench ": " heading()
    if (!(bench in columns)) benches[++bench_count] = bench
    columns[bench]++
    name = bench SUBSEP columns[bench]
    title[name] = value["way"] != "" ? value["way"] : heading()
    for (i = 1; i <= n; i++) {
        if (key[i] ~ /^(bench|way|list|reclaim|transport|workers|processor|cores|memory_gib|device|device_name)$/)
            continue
        if (!((bench, key[i]) in known)) {
            known[bench, key[i]] = 1
            line_of[bench, ++lines[bench]] = key[i]
        }
        cell[name, key[i]] = shown(value[key[i]])
    }
}

function print_bench(bench,    i, j, text, rule) {
    text = "| |"
    rule = "|---|"
    for (j = 1; j <= columns[bench]; j++) {
        text = text " " title[bench, j] " |"
        rule = rule "---|"
    }
    printf "\n## %s\n\n%s\n%s\n", bench, text, rule
    for (i = 1; i <= lines[bench]; i++) {
        text = "| " line_of[bench, i] " |"
        for (j = 1; j <= columns[bench]; j++) text = text " " cell[bench, j, line_of[bench, i]] " |"
        print text
    }
}

/^\{"machine"/ || /^"(steps|tests|benches)"/ { next }
/^\{"step"/ {
    take($0)
    steps[++step_count] = sprintf("| %s | %s | %s | %s |", value["step"], value["status"], \
        value["seconds"], value["note"])
    next
}
/^\{"suite"/ {
    take($0)
    ran[value["status"]]++
    if (value["status"] == "fail")
        failed[++failed_count] = "- " value["suite"] ": " value["test"] \
            (value["on"] == "" ? "" : " (" value["on"] ")")
    next
}
/^\{"bench"/ { take($0); hold_against_goals(); keep_column(); next }
/^\{/ {
    take($0)
    for (i = 1; i <= n; i++) machine[i] = key[i] ": " value[key[i]]
    machine_count = n
    rehearsal = value["rehearsal"] == "true"
}

END {
    print rehearsal ? "# A rehearsal on the fake driver: no figure here means anything" \
        : "# refit on a GPU"
    print ""
    for (i = 1; i <= machine_count; i++) print "- " machine[i]
    printf "\nTests: %d passed, %d failed, %d skipped.\n", ran["pass"], ran["fail"], ran["skip"]
    for (i = 1; i <= failed_count; i++) print failed[i]
    if (goal_count > 0) print "\n## Goals\n\n| | goal | measured | met |\n|---|---|---|---|"
    for (i = 1; i <= goal_count; i++) print goals[i]
    for (i = 1; i <= bench_count; i++) print_bench(benches[i])
    print "\n## Steps\n\n| | | seconds | |\n|---|---|---|---|"
    for (i = 1; i <= step_count; i++) print steps[i]
}
