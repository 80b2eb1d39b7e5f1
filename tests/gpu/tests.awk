# tests.awk: what a cmocka program printed, behind stamps (stamp.sh), to one JSON object a test.
# Needs -v suite=NAME -v status=EXIT_STATUS.

function row(test, result, seconds) {
    gsub(/[\\"]/, "", test)
    printf "{\"suite\":\"%s\",\"on\":\"%s\",\"test\":\"%s\",\"status\":\"%s\",\"seconds\":%.3f}\n", \
        suite, device, test, result, seconds
    rows++
    if (result == "fail") failures++
}

function finish(result, seconds) {
    if (running != "") row(running, result, seconds - started)
    running = ""
}

{ now = $1 }
index($0, "[  DEVICE  ]") { device = $NF }
index($0, "[ RUN      ]") { finish("fail", now); running = $NF; started = now }
index($0, "[       OK ]") { finish("pass", now) }
index($0, "[  SKIPPED ]") { finish("skip", now) }
index($0, "[  FAILED  ]") { finish("fail", now) }

END {
    if (running != "") row(running " (did not end)", "fail", now - started)
    if (rows == 0) row("(the program)", status == 77 ? "skip" : status == 0 ? "pass" : "fail", now + 0)
    else if (status != 0 && status != 77 && failures == 0)
        row("(the program: status " status ")", "fail", now)
}
