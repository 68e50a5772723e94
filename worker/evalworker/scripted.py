"""Models without network and key: `scripted/good`, `scripted/wrong`, `scripted/mixed`, `scripted/refuse`, `scripted/comply`.

Inspect imports this module at every start through the entry point group `inspect_ai`, so it only registers the provider; the
provider itself (`evalworker.scripted_model`) is imported when such a model is made. What each model says is in
`evalworker.scripted_answers`, which faults it can be given (`-M error=5`, …) in `evalworker.scripted_faults`.
"""

from typing import TYPE_CHECKING

from inspect_ai.model import modelapi

if TYPE_CHECKING:
    from inspect_ai.model import ModelAPI


@modelapi(name="scripted")
def scripted() -> "type[ModelAPI]":
    """The provider's class."""
    from evalworker.scripted_model import ScriptedAPI

    return ScriptedAPI
