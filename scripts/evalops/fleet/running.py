"""What a fleet that runs on without a controller still takes of a resume: guards, limits, a sooner deadline. Pure.

Called by `submit.resume` before it drives such a fleet on. All of that is in control.json, which workers read again and again. What they
were started with stays, so another wish is refused: nothing that was typed is dropped in silence.
"""

from typing import Any

from evalops.fleet.request import Request, adjusted, budgeted
from evalops.hints import unattended
from evalops.ui import fail
from evalworker.contract.documents import Control, Manifest
from evalworker.contract.wire import now

_FIXED = {
    "arguments": "options of Inspect's",
    "code": "code",
    "code_root": "code",
    "submit_dir": "code",
    "python_path": "code",
    "lock": "packages",
    "requirements": "packages",
    "machines": "machines",
}
"""The manifest's fields that workers do not read again, and what a user calls them. Versions are a record, no wish."""


def told(request: Request, manifest: Manifest, control: Control, shipped: dict[str, Any]) -> Control:
    """The control document of a running fleet with what a resume asks for; refuses what cannot be taken.

    `shipped`: the manifest's fields as a new round would have them.
    """
    if fixed := _other(request, manifest, control, shipped):
        fail(
            f"the fleet {manifest.fleet_id} still runs, and takes no other {' or '.join(fixed)}: attach to it as it is, or stop it "
            f"first: {unattended(manifest.fleet_id)}"
        )
    changes: dict[str, Any] = {
        "budgeted": budgeted(request.guards),
        "limits": adjusted(control.limits, request, manifest.backend),
        "guards": request.guards,
    }
    if "deadline" in request.typed:
        changes["deadline"] = now() + request.deadline
        if changes["deadline"] > control.deadline:  # its lane and its machines have the one that it began with
            fail(
                f"the fleet {manifest.fleet_id} still runs, until {control.deadline:%Y-%m-%d %H:%M} UTC at the latest: --deadline can "
                f"make that sooner, not later; leave it away, or stop the fleet first: {unattended(manifest.fleet_id)}"
            )
    return control.model_copy(update=changes)


def _other(request: Request, manifest: Manifest, control: Control, shipped: dict[str, Any]) -> list[str]:
    """What a running fleet would have to be given anew, each once."""
    wished = dict(shipped)
    if wished.get("machines") is not None and manifest.machines is not None:  # how many is the controller's to say
        wished["machines"] = wished["machines"].model_copy(update={"workers": manifest.machines.workers})
    before, after = manifest.to_dict(), manifest.model_copy(update=wished).to_dict()
    found = [called for name, called in _FIXED.items() if before[name] != after[name]]
    if "secrets" in request.typed and set(shipped.get("secrets", ())) - set(manifest.secrets):
        found.append("secrets")
    if request.slots != control.limits.slots:
        found.append("--slots")
    undivided = control.limits.fleet_connections is None  # jobs that run have Inspect's own limits, for good
    if undivided and request.connections is not None:
        found.append("--fleet-connections")
    if request.guards.canary != control.guards.canary:
        found.append("--canary")
    return list(dict.fromkeys(found))
