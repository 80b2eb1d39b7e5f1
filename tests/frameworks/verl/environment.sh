# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
# verl on a machine without a GPU: cpu_platform.py is the platform, transformers and Ray come along.
versions="0.9.1"
megabytes=6000
minutes="4 6"

install() {
    "$pip" -q install torch==2.13.0 "verl==$1" transformers==5.10.4 ray==2.60.0 uvicorn fastapi
}
