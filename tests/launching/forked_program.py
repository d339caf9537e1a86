"""Says who it is, and ends as its arguments say: `STATUS`, `signal`, or `never`."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    print(os.environ["NAME"], sys.argv[1:], os.getpid() == os.getsid(0), sys.stdin.read(), flush=True)
    print("on standard error", file=sys.stderr)
    if sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    while sys.argv[1] == "never":
        time.sleep(1)
    sys.exit(int(sys.argv[1]))
