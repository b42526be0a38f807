"""A stage that writes one result, then waits for the interrupt, which --deaf ignores."""

import argparse
import json
import signal

parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--deaf", action="store_true")
asked = parser.parse_args()
if asked.deaf:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(asked.json, "w") as file:
    file.write(json.dumps({"name": "captures", "ok": False, "error": "refused"}) + '\n{"name": "half a line')
signal.pause()
