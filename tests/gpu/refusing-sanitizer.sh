#!/bin/sh
# refusing-sanitizer.sh: what compute-sanitizer says on a machine that it does not support, for the
# rehearsal of run.sh, which must not count that as a failure.
echo "========= COMPUTE-SANITIZER"
echo "========= Error: Device not supported. Please refer to the \"Supported Devices\" section"
echo "========= ERROR SUMMARY: 1 error"
exit 1
