"""The adapters of a PEFT model alone, under the names that PEFT saves them under.

Those are the names that inference engines load adapters by: ``base_model.model.`` and the module's
name, ``.lora_A.weight`` or the like, without the name that the adapter has in this model. PEFT
itself says which tensors they are; nothing is copied.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from refit.errors import InvalidError, StateError, UnsupportedError
from refit.weights.layers import Found
from refit.weights.merged import is_adapted, is_off
from refit.weights.wrappers import plain_names, unwrapped


def adapter_weights(model: nn.Module) -> list[Found]:
    """What PEFT would save of the active adapter. InvalidError: there is none. UnsupportedError:
    there are several. StateError: adapters are off."""
    root = _root_of(model)
    adapter = _active_in(root)
    if any(is_adapted(one) and is_off(one) for one in root.modules()):
        raise StateError(
            'lora="adapter" sends adapters that the model computes with, and they are off now: '
            "send them outside of disable_adapter()"
        )
    from peft import get_peft_model_state_dict

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = get_peft_model_state_dict(
        root, root.state_dict(), adapter_name=adapter, save_embedding_layers=False
    )
    plain = plain_names(root)
    return [Found(plain(name), tensor, True, True) for name, tensor in tensors.items()]


def _root_of(model: nn.Module) -> Any:
    module: nn.Module | None = model
    while module is not None:
        if getattr(module, "peft_config", None):
            return module
        module = unwrapped(module)
    raise InvalidError(
        f'lora="adapter" is for a model with adapters of PEFT: a {type(model).__name__} has none'
    )


def _active_in(root: Any) -> str:
    found = root.active_adapters
    names = list(found() if callable(found) else found)
    if len(names) != 1:
        raise UnsupportedError(
            f"{len(names)} adapters are active ({', '.join(names)}), and their names would be the "
            'same: activate one with model.set_adapter, or send lora="merged"'
        )
    return str(names[0])
