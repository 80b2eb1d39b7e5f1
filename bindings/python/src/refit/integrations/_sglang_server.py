"""A running SGLang server, by HTTP: the calls of sglang.Engine that an update makes.

The tensors of a call travel in it, pickled by value, so that the server may be on another host. An
answer of the server is a value, as the engine's is; only a server that does not answer raises.
"""

import base64
import json
import pickle
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from refit.errors import ClosedError, DeadlineError, InvalidError, PeerError, SecurityError

ANSWER_S = 900.0
"""Seconds for one call: more than a worker waits for a version."""


class Server:
    """A server that was started with ``--custom-weight-loader`` and refit's loaders.

    `url`: such as ``http://127.0.0.1:30000``. `api_key`: the server's admin key, or its API key.
    `timeout`: seconds for one call, which must be more than that of ``refit_update``. Each call
    blocks. ClosedError (no server there, or it ended meanwhile), DeadlineError, SecurityError (the
    key), PeerError (an answer that is none of SGLang's), InvalidError (an address without http://).
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = ANSWER_S) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidError(f'the server\'s address is "{url}": it begins with http://')
        self._url = url.rstrip("/")
        self._key = api_key
        self._timeout = timeout
        self._known: dict[str, Any] | None = None

    @property
    def custom_weight_loader(self) -> list[str]:
        """The loaders that the server was started with."""
        return list(self._started_with().get("custom_weight_loader") or [])

    def begin_weight_update(self) -> tuple[bool, str]:
        """Opens a session. A server from before 0.5.21 has none, and needs none."""
        return self._outcome(self._post("begin_weight_update", {}, missing={"success": True}))

    def end_weight_update(self) -> tuple[bool, str]:
        """Ends the session."""
        return self._outcome(self._post("end_weight_update", {}, missing={"success": True}))

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Hands named tensors to a loader of each rank."""
        body = {
            "serialized_named_tensors": self._for_each_rank(named_tensors),
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        return self._outcome(self._post("update_weights_from_tensor", body))

    def update_weight_version(self, version: str) -> tuple[bool, str]:
        """Says which version its answers are made by; not to a server that does not say so."""
        body = {"new_version": version, "abort_all_requests": False}
        return self._outcome(self._post("update_weight_version", body, missing={"success": True}))

    def load_lora_adapter_from_tensors(
        self, lora_name: str, tensors: Mapping[str, Any], config_dict: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Hands an adapter over; the answer has ``success`` and ``error_message``."""
        body = {
            "lora_name": lora_name,
            "config_dict": dict(config_dict),
            "serialized_named_tensors": self._for_each_rank(dict(tensors)),
        }
        return self._post("load_lora_adapter_from_tensors", body)

    def unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Makes an adapter leave; the answer has ``success`` and ``error_message``."""
        return self._post("unload_lora_adapter", {"lora_name": lora_name})

    def _for_each_rank(self, tensors: Any) -> list[str]:
        ranks = int(self._started_with().get("tp_size") or 1)
        return [base64.b64encode(pickle.dumps(tensors)).decode()] * ranks

    def _started_with(self) -> dict[str, Any]:
        """The server's arguments, asked for once."""
        if self._known is None:
            said = self._request("server_info", None, None)
            self._known = said or self._request("get_server_info", None, {}) or {}
        return self._known

    def _outcome(self, said: Mapping[str, Any]) -> tuple[bool, str]:
        return bool(said.get("success")), str(said.get("message") or said.get("error") or said)

    def _post(self, verb: str, body: Any, missing: Any = None) -> dict[str, Any]:
        said = self._request(verb, body, missing)
        if said is None:
            raise PeerError(f"the server at {self._url} has no {verb}: is it SGLang?")
        return said

    def _request(self, verb: str, body: Any, missing: Any) -> dict[str, Any] | None:
        """The server's JSON; `missing` where it has no such call."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{verb}", data)
        request.add_header("Content-Type", "application/json")
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                text, code = answer.read(), answer.status
        except urllib.error.HTTPError as why:
            text, code = why.read(), why.code
        except TimeoutError as why:
            raise DeadlineError(f"{verb}: no answer of {self._url} in {self._timeout:g} s") from why
        except (OSError, HTTPException) as why:
            if isinstance(getattr(why, "reason", None), TimeoutError):
                raise DeadlineError(f"{verb}: {self._url} cannot be reached in time") from why
            raise ClosedError(f"{verb}: the server at {self._url} does not answer: {why}") from why
        if code == 404:
            return None if missing is None else dict(missing)
        if code in (401, 403):
            raise SecurityError(f"{verb}: the server at {self._url} refuses the API key ({code})")
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise PeerError(f"{verb}: {code} of {self._url}: {text[:300].decode(errors='replace')}")
        return said
