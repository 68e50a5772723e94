"""Makes AWS calls go wrong in the processes of a fleet under test: put this folder on PYTHONPATH and name the faults in `FAULTS`.

`FAULTS` is a JSON list; the first fault that fits a call answers it before anything is sent. A fault fits by `operation` and by a part of
the URL (`url`); `times` is how often a process meets it (null: always), `code` and `status` are the answer, `delay_s` only slows the call.
`lost` sends the call and then answers with a broken connection, as when a reply is lost.
"""

import json
import os
import time
from typing import Any

if "FAULTS" in os.environ:
    import botocore.awsrequest
    import botocore.client
    import botocore.exceptions
    import urllib3.response

    _FAULTS: list[dict[str, Any]] = json.loads(os.environ["FAULTS"])
    _MADE = botocore.client.ClientCreator.create_client
    _SENT = botocore.client.BaseClient

    def _answer(request: Any, fault: dict[str, Any]) -> Any:
        body = f"<Error><Code>{fault['code']}</Code><Message>injected</Message></Error>".encode()
        raw = urllib3.response.HTTPResponse(body=[body], preload_content=False)
        raw.stream = lambda **_: iter([body])  # type: ignore[method-assign]
        return botocore.awsrequest.AWSResponse(request.url, fault["status"], {"content-type": "application/xml"}, raw)

    def _before(request: Any, event_name: str, **_: Any) -> Any:
        operation = event_name.rsplit(".", 1)[-1]
        for fault in _FAULTS:
            if fault["operation"] != operation or fault.get("url", "") not in request.url or fault.get("times") == 0:
                continue
            if fault.get("times"):
                fault["times"] -= 1
            time.sleep(fault.get("delay_s", 0))
            if fault.get("lost"):
                botocore.httpsession.URLLib3Session().send(request.copy() if hasattr(request, "copy") else request)
                raise botocore.exceptions.ConnectionClosedError(endpoint_url=request.url)
            if "status" in fault:
                return _answer(request, fault)
        return None

    def _create(self: Any, *arguments: Any, **options: Any) -> Any:
        client = _MADE(self, *arguments, **options)
        client.meta.events.register("before-send.*.*", _before)
        client.meta.events.register("before-send", _before)
        return client

    botocore.client.ClientCreator.create_client = _create
