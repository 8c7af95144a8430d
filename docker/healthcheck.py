"""Health check of a container: exit code 0 while the server in it answers 200 on /health.

/health is open, so no key is needed, and none is read. DRAFT_ENGINE_PORT says where it listens (8100 where it is not set, the
draft server's own default), and with a certificate the check speaks TLS to itself without looking at the name.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 4.0


def main() -> int:
    """Ask once; returns the exit code."""
    port = os.environ.get("DRAFT_ENGINE_PORT") or "8100"
    context = None
    scheme = "http"
    if os.environ.get("DRAFT_ENGINE_SSL_CERTFILE"):
        scheme, context = "https", ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://127.0.0.1:{port}/health", timeout=TIMEOUT_SECONDS) as reply:
            return 0 if reply.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
