# tests.awk: what a cmocka program printed, after stamps (stamp.sh), to one JSON object a test.
# Needs -v suite=NAME -v status=EXIT_STATUS. Programs that play scenes side by side (scenes.h) print
# them interleaved: a result counts if a test of that name runs, whatever was printed before it.

function row(test, result, seconds) {
    gsub(/[\\"]/, "", test)
    printf "{\"suite\":\"%s\",\"on\":\"%s\",\"test\":\"%s\",\"status\":\"%s\",\"seconds\":%.3f}\n", \
        suite, device, test, result, seconds
    rows++
    if (result == "fail") failures++
}

# The words after the mark; "": the line is another.
function after(mark,    at) {
    at = index($0, mark " ")
    return at == 0 ? "" : substr($0, at + length(mark) + 1)
}

function finish(mark, result,    test) {
    test = after(mark)
    if (!(test in begun)) return # as in the list at the end of what has failed
    row(test, result, now - begun[test])
    delete begun[test]
}

{ now = $1 }
index($0, "[  DEVICE  ]") { device = $NF }
after("[ RUN      ]") != "" { begun[after("[ RUN      ]")] = now }
{
    finish("[       OK ]", "pass")
    finish("[  SKIPPED ]", "skip")
    finish("[  FAILED  ]", "fail")
}

END {
    for (test in begun) row(test " (did not end)", "fail", now - begun[test])
    if (rows == 0) row("(the program)", status == 77 ? "skip" : status == 0 ? "pass" : "fail", now + 0)
    else if (status != 0 && status != 77 && failures == 0)
        row("(the program: status " status ")", "fail", now)
}
