"""moto's S3 server with puts that are atomic.

    python atomic_moto.py PORT

moto looks whether an object is there and stores it afterwards, without a lock between its threads: on a busy machine
two conditional puts of one key both win. S3 promises that one does, and so does this.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple

_one_at_a_time = threading.Lock()
_moto = DomainDispatcherApplication(create_backend_app)


def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    if "HTTP_IF_NONE_MATCH" not in environ:
        return _moto(environ, start_response)
    # The body first: a slow client must not keep the others waiting.
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    with _one_at_a_time:
        return list(_moto(environ, start_response))


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=MotoRequestHandler)
